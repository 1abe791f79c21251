"""mergekit's writer, which every plan ends in."""

from __future__ import annotations

import functools
import os

from mergekit.io import tensor_writer
from safetensors import SafetensorError

from mergekit_ram.host import output
from mergekit_ram.host.compatibility import require_parameters
from mergekit_ram.plugin.extending import is_extended, marked


def extend_writer() -> None:
    """Name the file that cannot be written, if of a model merged by our methods."""
    writer = tensor_writer.TensorWriter
    require_parameters(writer, "_write_shard_task", ["shard_data", "shard_index", "shard_path"])
    write = writer._write_shard_task
    if is_extended(write):
        return

    @functools.wraps(write)
    def extended_write(self, shard_data, shard_index, shard_path) -> None:
        try:
            write(self, shard_data, shard_index, shard_path)
        except (OSError, SafetensorError, RuntimeError) as error:
            directory = output.published_at(self.out_path)
            if directory == self.out_path:
                raise
            reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
            file = os.path.join(directory, os.path.basename(shard_path))
            raise output.unwritable(file, reason) from error

    writer._write_shard_task = marked(extended_write)
