"""The output directory: whole, or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import traceback
from collections.abc import Iterator

from safetensors import SafetensorError

from mergekit_ram.errors import WriteError
from mergekit_ram.report import FILE_NAME, Report

# What makes a directory pass for a model: the first to go, the last to come.
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MARKS = (*_INDEXES, "config.json")
# Another model's weights, left beside the new ones, would be read instead of them.
_WEIGHTS = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin"
)
_PARTIAL = ".mergekit-ram-partial"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


@contextlib.contextmanager
def staged_output(out_path: str) -> Iterator[str]:
    """A directory to write a model into that becomes ``out_path`` once the block ends without an error.

    It lies hidden beside ``out_path``, or in it if that exists, on the same file system. After an error it is removed
    and ``out_path`` is as it was; one that a killed process left behind is removed by the next merge to the same
    place. Of the files already in ``out_path``, weights and those that the new model has too are replaced.

    Raises:
        WriteError: the disk is full, or does not take the files for another reason.
    """
    out_path = os.path.normpath(out_path)
    parent, name = os.path.split(os.path.abspath(out_path))
    if os.path.isdir(out_path):
        partial = os.path.join(out_path, _PARTIAL)
    else:
        partial = os.path.join(os.path.dirname(out_path), f".{name}{_PARTIAL}")
    staging = os.path.join(partial, name)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        os.makedirs(staging)
        yield staging
        for entry in os.listdir(partial):
            final = out_path if entry == name else os.path.join(parent, entry)
            _publish(os.path.join(partial, entry), final)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = _write_failure(error)
        if reason is None:
            raise
        file = os.path.join(out_path, _file_being_written(error, staging))
        raise WriteError(
            f"{file} cannot be written: {reason}. Nothing of the merged model was kept"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def published_at(path: str) -> str:
    """Where a directory of ``staged_output`` is going to be; other paths as they are."""
    partial, name = os.path.split(path)
    if os.path.basename(partial) == _PARTIAL:
        return os.path.dirname(partial) or "."
    if os.path.basename(partial) == f".{name}{_PARTIAL}":
        return os.path.join(os.path.dirname(partial), name)
    return path


def replaces(name: str) -> bool:
    """Whether a file of that name does not outlive a merge into its directory."""
    return _WEIGHTS.fullmatch(name) is not None


def _write_failure(error: Exception) -> str | None:
    """Why writing failed, None if something else did."""
    if isinstance(error, OSError):
        return error.strerror if error.errno in _NO_ROOM else None
    message = str(error).split("\n")[0]
    if isinstance(error, SafetensorError):
        found = re.search(r"serializing: (?:I/O error: )?(.*)", message)
        return found and found[1] if "deserializing" not in message else None
    if re.search(r"inline_container\.cc|PytorchStreamWriter|iostream error", message):
        return f"the disk is full or fails ({message})"
    return None


def _file_being_written(error: Exception, directory: str) -> str:
    """Name of the file; safetensors, which leaves no file behind, was given its path."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "save_file" and "filename" in frame.f_locals:
            return os.path.basename(frame.f_locals["filename"])
    files = [entry for entry in os.scandir(directory) if entry.is_file()]
    return max(files, key=lambda entry: entry.stat().st_mtime_ns).name if files else ""


def add_card_section(directory: str) -> None:
    """Describe the agents in a written model's card, if it has both a card and a report."""
    card = os.path.join(directory, "README.md")
    report = os.path.join(directory, FILE_NAME)
    if os.path.exists(card) and os.path.exists(report):
        with open(report, encoding="utf-8") as file:
            section = Report.model_validate_json(file.read()).to_markdown()
        with open(card, "a", encoding="utf-8") as file:
            file.write("\n" + section)


def _publish(staged: str, final: str) -> None:
    if not os.path.isdir(staged) or not os.path.exists(final):
        os.replace(staged, final)
        return
    for name in (*_MARKS, *filter(replaces, os.listdir(final))):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(final, name))
    for name in sorted(os.listdir(staged), key=lambda name: name in _MARKS):
        target = os.path.join(final, name)
        if os.path.isdir(target) and not os.path.islink(target):
            shutil.rmtree(target)
        os.replace(os.path.join(staged, name), target)
