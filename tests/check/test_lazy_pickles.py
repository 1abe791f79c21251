"""Pickles that lazy unpickling misreads are refused by option, with what to do instead."""

from __future__ import annotations

import pytest
import torch
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import merge_raw_pytorch, run_yaml

from mergekit_ram import cli
from support import checkpoints
from support.spoilt import refusals, run


def with_gaps(weights):
    return {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in weights.items()}


UNREADABLE = {
    "parameters": lambda w: {n: torch.nn.Parameter(t) for n, t in w.items()},
    "views with gaps": with_gaps,
    "bool beside": lambda w: {**w, "mask": torch.ones(2, dtype=torch.bool)},
}


def pickled_as(change, models) -> None:
    for directory in models[1:]:
        file = directory / "pytorch_model.bin"
        torch.save(change(torch.load(file, weights_only=True)), file)


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_pickles_that_lazy_unpickling_misreads_are_refused_lazily_and_merged_otherwise(
    change, models, tmp_path
):
    expected = checkpoints.read(models[1])
    pickled_as(change, models)
    for message in refusals(tmp_path, models, "--lazy-unpickle"):
        assert str(models[1]) in message
        assert "without --lazy-unpickle" in message
    LoaderCache().loaders.clear()
    for command in (cli.check, cli.inspect, cli.compare):
        result = run(command, tmp_path, models)
        assert result.exit_code == 0, result.output
    result = run(run_yaml.main, tmp_path, models[:2], tmp_path / "merged")
    assert result.exit_code == 0, result.output
    for name, tensor in checkpoints.read(tmp_path / "merged").items():
        assert torch.allclose(tensor, expected[name], atol=1e-6)


@pytest.mark.parametrize("change", UNREADABLE.values(), ids=UNREADABLE)
def test_files_that_lazy_unpickling_misreads_are_refused(change, models, tmp_path):
    pickled_as(change, models)
    files = [directory / "pytorch_model.bin" for directory in models]
    out = tmp_path / "merged"
    result = run(merge_raw_pytorch.main, tmp_path, files, out, "--lazy-unpickle")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert "without --lazy-unpickle" in result.output
    assert not out.exists()


def test_pickles_that_lazy_unpickling_reads_are_merged_lazily(models, tmp_path):
    """Also where an entry that is not merged could not be read."""
    expected = checkpoints.read(models[1])
    beside = {"beside": torch.tensor(1.0), "epoch": 3}
    pickled_as(lambda w: {**{n: t.T.contiguous().T for n, t in w.items()}, **beside}, models)
    out = tmp_path / "merged"
    result = run(run_yaml.main, tmp_path, models[:2], out, "--lazy-unpickle")
    assert result.exit_code == 0, result.output
    for name, tensor in checkpoints.read(out).items():
        assert torch.allclose(tensor, expected[name], atol=1e-6)
