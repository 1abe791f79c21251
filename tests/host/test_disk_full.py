"""Merges that run out of disk or are interrupted: an error that says so, nothing left."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal

import pytest
import transformers

from mergekit_ram.method import stream as kernel
from mergekit_ram.report.record import Report
from support.jobs import ENTRIES, Job, contents, in_child


def in_little_space(job: Job, limit: int, *options: str) -> tuple[int, str]:
    """Exit code and output of a merge whose files cannot grow over the limit, in bytes."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        result = job.run(*options)
        sender.send((result.exit_code, result.output, repr(result.exception)))

    assert in_child(run) == 0
    code, output, exception = receiver.recv()
    assert exception == "SystemExit(1)", exception
    return code, output


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "options",
    [(), ("--async-write",), ("--no-safe-serialization",), ("--out-shard-size", "8K")],
    ids=" ".join,
)
def test_full_disk_is_an_error_that_names_the_file(entry, options, make_models, tmp_path):
    models = make_models()
    job = Job(entry, models, tmp_path)
    code, output = in_little_space(job, 6000, *options)
    assert code == 1
    assert "Traceback" not in output
    at = job.first if entry == "multi" else job.out
    stem = "pytorch_model" if "safe-serialization" in str(options) else "model"
    assert f"{at}/{stem}-1." in output
    assert "cannot be written" in output
    assert not at.exists()
    job.assert_nothing_left()
    assert job.run(*options).exit_code == 0
    job.assert_finished()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("what", ["report", "config"])
def test_disk_full_at_the_end_is_an_error_too(what, number, make_models, tmp_path, monkeypatch):
    job = Job("yaml", make_models(), tmp_path)
    owner, name = {
        "report": (Report, "write"),
        "config": (transformers.Qwen2Config, "save_pretrained"),
    }[what]

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        result = job.run()
    assert result.exit_code == 1
    assert os.strerror(number) in result.output
    assert str(job.out) in result.output
    assert not job.out.exists()
    job.assert_nothing_left()
    assert job.run().exit_code == 0
    job.assert_finished()


def test_full_disk_leaves_the_old_model(make_models, tmp_path):
    job = Job("yaml", make_models(), tmp_path)
    assert job.run().exit_code == 0
    old = contents(job.out)
    in_little_space(job, 6000)
    assert contents(job.out) == old
    job.assert_nothing_left()


def test_interrupted_merge_leaves_nothing(make_models, tmp_path, monkeypatch):
    job = Job("yaml", make_models(), tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernel._Stream, "merge", interrupt)
        assert job.run().exit_code != 0
    assert not job.out.exists()
    job.assert_nothing_left()
