"""The output directory: whole, or not there. One merge at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator

from filelock import FileLock, Timeout

from mergekit_ram.errors import WriteError
from mergekit_ram.host import publishing

_PARTIAL = ".mergekit-ram-partial"
_HOLDER = "holder.json"
_LOCK = "lock"
_NO_ROOM = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
}


@contextlib.contextmanager
def staged_output(out_path: str) -> Iterator[str]:
    """A directory to write a model into that becomes ``out_path`` unless the block fails.

    It lies hidden beside ``out_path``, or in it if that exists, on the same file system. After an
    error it is removed and ``out_path`` is as it was; one that a killed process left behind is
    removed by the next merge to the same place. A finished model that cannot be moved to
    ``out_path`` stays there. Of the files already in ``out_path``, weights and those that the new
    model has too are replaced.

    Raises:
        WriteError: another merge writes there, ``out_path`` cannot be a directory, the disk is
            full, or does not take the files for another reason.
    """
    out_path = os.path.normpath(out_path)
    fault = unusable(out_path)
    if fault:
        raise WriteError(f"{fault}. Write the merged model to another directory")
    partial = _partial(out_path)
    staging = os.path.join(partial, os.path.basename(os.path.abspath(out_path)))
    with _locked(out_path, partial):
        publishing.recover(partial, out_path)
        _clear(partial)
        finished = False
        try:
            os.makedirs(staging)
            _note_holder(partial)
            yield staging
            finished = True
            publishing.publish(staging, out_path, partial)
        except (OSError, WriteError) as error:
            if finished and publishing.unfinished(partial):
                raise
            if finished:
                reason = error.strerror if isinstance(error, OSError) else error
                raise WriteError(
                    f"the merged model is finished but could not be moved to {out_path}: "
                    f"{reason}. It stays in {staging}; move it from there, for the next merge to "
                    f"the same place begins by removing it. What was in {out_path} is as it was"
                ) from error
            if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
                raise
            file = os.path.join(out_path, _newest_file(staging))
            raise unwritable(file, error.strerror) from error
        finally:
            published = not os.path.isdir(staging) or not os.listdir(staging)
            if not publishing.unfinished(partial) and (published or not finished):
                _clear(partial)


def unwritable(file: str, reason: str) -> WriteError:
    """The error of a file of the merged model that cannot be written."""
    return WriteError(f"{file} cannot be written: {reason}. Nothing of the merged model was kept")


def unusable(out_path: str) -> str | None:
    """Why a model cannot be written to a path, whatever the model; None if it can."""
    if os.path.isdir(out_path):
        return None
    if os.path.islink(out_path):
        return f"the output {out_path} is a link to {os.readlink(out_path)}, which is no directory"
    existing = os.path.abspath(out_path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        kind = "file" if os.path.isfile(existing) else "link that leads nowhere"
        return f"the output {out_path} cannot be made: {existing} is a {kind}"
    return None


def _partial(out_path: str) -> str:
    if os.path.isdir(out_path):
        return os.path.join(out_path, _PARTIAL)
    name = os.path.basename(os.path.abspath(out_path))
    return os.path.join(os.path.dirname(out_path), f".{name}{_PARTIAL}")


@contextlib.contextmanager
def _locked(out_path: str, partial: str) -> Iterator[None]:
    """Keep other merges from the output. The system releases a killed process's lock."""
    path = os.path.join(partial, _LOCK)
    lock = FileLock(path, timeout=0)
    while True:
        try:
            os.makedirs(partial, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise WriteError(
                f"{_holder(partial)} writes to {out_path} at "
                "this moment: wait for it, or write elsewhere"
            ) from None
        except OSError as error:
            raise unwritable(out_path, error.strerror) from error
        if os.path.exists(path):
            break
        # Its last holder removed the file between opening and locking it.
        lock.release()
    try:
        yield
    finally:
        if os.listdir(partial) == [_LOCK]:
            shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def _clear(partial: str) -> None:
    """Remove everything but the lock."""
    for entry in os.scandir(partial):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != _LOCK:
            os.unlink(entry.path)


def _note_holder(partial: str) -> None:
    holder = {
        "process": os.getpid(),
        "host": platform.node(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    with open(os.path.join(partial, _HOLDER), "w", encoding="utf-8") as file:
        json.dump(holder, file)


def _holder(partial: str) -> str:
    try:
        with open(os.path.join(partial, _HOLDER), encoding="utf-8") as file:
            holder = json.load(file)
        return (
            f"another merge (process {holder['process']} on {holder['host']}, "
            f"since {holder['since']})"
        )
    except (OSError, ValueError, KeyError):  # it has only begun
        return "another merge"


def published_at(path: str) -> str:
    """Where a directory of ``staged_output`` is going to be; other paths as they are."""
    partial, name = os.path.split(path)
    if os.path.basename(partial) == _PARTIAL:
        return os.path.dirname(partial) or "."
    if os.path.basename(partial) == f".{name}{_PARTIAL}":
        return os.path.join(os.path.dirname(partial), name)
    return path


def _newest_file(directory: str) -> str:
    """Name of the file that was written last; empty if there is none."""
    if not os.path.isdir(directory):
        return ""
    files = [entry for entry in os.scandir(directory) if entry.is_file()]
    return max(files, key=lambda entry: entry.stat().st_mtime_ns).name if files else ""
