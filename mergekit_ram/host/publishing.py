"""Moving a finished model into its place: the old one whole or the new one, whatever fails.

Everything is renamed within one file system. What is replaced waits in a directory of its own until
the last file is in place, so an error takes every step back, and the next merge takes back those of
a killed process.
"""

from __future__ import annotations

import json
import os
import re
import shutil

from mergekit_ram.errors import WriteError

# What makes a directory pass for a model: the first to go, the last to come.
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_MARKS = (*_INDEXES, "config.json")
# Another model's weights, left beside the new ones, would be read instead of them.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin")
_REPLACED = "replaced"
_JOURNAL = "journal.json"


def replaces(name: str) -> bool:
    """Whether a file of that name does not outlive a merge into its directory."""
    return _WEIGHTS.fullmatch(name) is not None


def publish(staging: str, final: str, scratch: str) -> None:
    """Move the files of a finished model from ``staging`` to ``final``, which may not exist.

    Weights and files that the new model has too are replaced; other files and all directories of
    ``final`` stay.

    Args:
        scratch: a directory on the same file system, for what is replaced meanwhile.

    Raises:
        WriteError: a directory stands where a file has to go, and nothing was moved; or something
            could be neither moved nor taken back, which the next ``recover`` does.
        OSError: something could not be moved; everything is where it was.
    """
    if not os.path.exists(final):
        os.replace(staging, final)
        return
    new = sorted(os.listdir(staging), key=lambda name: name in _MARKS)
    present = os.listdir(final)
    old = [
        *filter(present.__contains__, _MARKS),
        *(n for n in present if n not in _MARKS and (n in new or replaces(n))),
    ]
    for name in old:
        place = os.path.join(final, name)
        if os.path.isdir(place) and not os.path.islink(place):
            raise WriteError(
                f"{place} is a directory, where the merged model "
                "has a file or a directory of its own: move it away"
            )
    replaced = os.path.join(scratch, _REPLACED)
    os.makedirs(replaced)
    with open(os.path.join(scratch, _JOURNAL), "w", encoding="utf-8") as file:
        json.dump({"staging": os.path.basename(staging), "new": new}, file)
    try:
        for name in old:
            os.replace(os.path.join(final, name), os.path.join(replaced, name))
        for name in new:
            os.replace(os.path.join(staging, name), os.path.join(final, name))
        # From here on the new model stands, and a killed process has nothing to take back.
        os.unlink(os.path.join(scratch, _JOURNAL))
    except BaseException:
        recover(scratch, final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def unfinished(scratch: str) -> bool:
    """Whether a ``publish`` has left something to take back."""
    return os.path.exists(os.path.join(scratch, _JOURNAL))


def recover(scratch: str, final: str) -> None:
    """Take back what a ``publish`` that did not come to its end has moved, if there was one.

    Raises:
        WriteError: something cannot be moved. What was moved back stays so, a further call goes on
            from there.
    """
    journal = os.path.join(scratch, _JOURNAL)
    if not os.path.exists(journal):
        return
    with open(journal, encoding="utf-8") as file:
        try:
            moving = json.load(file)
        except ValueError:  # killed while it was written, before anything was moved
            moving = {"staging": "", "new": []}
    staging = os.path.join(scratch, moving["staging"])
    replaced = os.path.join(scratch, _REPLACED)
    try:
        for name in reversed(moving["new"]):
            if not os.path.lexists(os.path.join(staging, name)):
                os.replace(os.path.join(final, name), os.path.join(staging, name))
        for name in sorted(os.listdir(replaced), key=lambda name: name in _MARKS):
            os.replace(os.path.join(replaced, name), os.path.join(final, name))
        # Before the directory, without which the journal could not be followed again.
        os.unlink(journal)
        os.rmdir(replaced)
    except OSError as error:
        raise WriteError(
            f"{final} holds parts of two models: {error.strerror}. What is not there of the old "
            f"one is in {replaced}, what is not there of the new one in {staging}. Once files "
            "can be moved again, the next merge to the same place begins by restoring the old one"
        ) from error
