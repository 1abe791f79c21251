"""A model over another: the old one whole or the new one whole, whatever fails."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal

import pytest

from mergekit_ram.errors import WriteError
from mergekit_ram.host import output
from support.outputs import AFTER, NEW, OLD, fail_at, fail_from, leftovers, merge, read, write


# Five files go and four come.
@pytest.mark.parametrize("call", range(1, 10))
@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSPC, errno.EACCES])
def test_old_model_is_whole_whichever_move_fails(call, number, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)
    with monkeypatch.context() as patch:
        calls = fail_at(patch, "replace", call, number)
        with pytest.raises(WriteError) as refused:
            merge(out)
    assert len(calls) >= call
    kept = out / ".mergekit-ram-partial" / "out"
    assert str(kept) in str(refused.value)
    assert os.strerror(number) in str(refused.value)
    assert read(kept) == NEW
    assert {n: c for n, c in read(out).items() if not n.startswith(".")} == OLD
    merge(out)
    assert read(out) == AFTER
    assert not leftovers(tmp_path)


def test_every_move_is_covered(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)
    calls = fail_at(monkeypatch, "replace", 100, errno.EIO)
    merge(out)
    assert len(calls) == 9


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSPC, errno.EACCES])
def test_finished_model_stays_where_a_new_directory_cannot_be_made(number, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        fail_at(patch, "replace", 1, number)
        with pytest.raises(WriteError) as refused:
            merge(out)
    kept = tmp_path / ".out.mergekit-ram-partial" / "out"
    assert str(kept) in str(refused.value)
    assert read(kept) == NEW
    assert not out.exists()
    merge(out)
    assert read(out) == NEW
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("call", range(1, 10))
def test_next_merge_takes_back_the_moves_of_a_killed_one(call, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)

    def killed():
        replace, calls = os.replace, []

        def killing(*arguments):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*arguments)

        os.replace = killing
        merge(out)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(RuntimeError), output.staged_output(str(out)):
        raise RuntimeError("the next merge fails too")
    assert read(out) == OLD
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("call", range(2, 10))
def test_message_says_what_stands_where_no_move_can_be_taken_back(call, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)
    with monkeypatch.context() as patch:
        fail_from(patch, "replace", call, errno.EACCES)
        with pytest.raises(WriteError) as refused:
            merge(out)
        message = str(refused.value)
        assert "as it was" not in message
        partial = out / ".mergekit-ram-partial"
        for part in (partial / "out", partial / "replaced"):
            assert str(part) in message
        assert os.strerror(errno.EACCES) in message
        everything = read(out)
        with pytest.raises(WriteError, match="replaced"):
            merge(out)
        assert read(out) == everything
    with pytest.raises(RuntimeError), output.staged_output(str(out)):
        raise RuntimeError("the next merge fails too")
    assert read(out) == OLD
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("name", ["replace", "rmdir", "unlink"])
@pytest.mark.parametrize("call", range(1, 5))
def test_taking_back_can_be_killed_too(name, call, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write(out, OLD)
    with monkeypatch.context() as patch:
        fail_from(patch, "replace", 8, errno.EACCES)
        with pytest.raises(WriteError):
            merge(out)

    def killed():
        function, calls = getattr(os, name), []

        def killing(*arguments, **options):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        setattr(os, name, killing)
        with output.staged_output(str(out)):
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(RuntimeError), output.staged_output(str(out)):
        raise RuntimeError("the next merge fails too")
    assert read(out) == OLD
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("name", NEW)
def test_users_directories_are_never_replaced(name, tmp_path):
    out = tmp_path / "out"
    old = {n: c for n, c in OLD.items() if n != name}
    write(out, old)
    write(out / name, {"mine.txt": "mine"})
    before = read(out)
    with pytest.raises(WriteError, match="is a directory") as refused:
        merge(out)
    kept = out / ".mergekit-ram-partial" / "out"
    assert str(out / name) in str(refused.value)
    assert str(kept) in str(refused.value)
    assert read(kept) == NEW
    after = read(out)
    assert {n: c for n, c in after.items() if not n.startswith(".")} == before


def test_links_are_replaced_and_not_followed(tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    write(out, {"notes.txt": "mine"})
    write(elsewhere, {"model.safetensors": "theirs"})
    (out / "model.safetensors").symlink_to(elsewhere / "model.safetensors")
    merge(out)
    assert read(out) == AFTER
    assert read(elsewhere) == {"model.safetensors": "theirs"}
