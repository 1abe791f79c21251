"""NaN, infinity and damage met while merging stop the merge by name."""

from __future__ import annotations

import math
from pathlib import Path

import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import numpy as np
import pytest
import torch
from mergekit.io.tasks import LoaderCache

from mergekit_ram.method import stream as kernel
from support import checkpoints
from support.commands import invoke_refused, merge, refusal
from support.expected import METHODS, expect, plan
from support.jobs import Job
from support.recipes import Models, save_models
from support.tensors import BF16

# --- Checkpoints damaged while merging ------------------------------------------------------------


@pytest.mark.parametrize("damage", ["removed", "truncated"])
@pytest.mark.parametrize("entry", ["yaml", "pytorch"])
def test_file_damaged_while_merging_is_named(entry, damage, make_models, tmp_path, monkeypatch):
    models = make_models(shards=1 if entry == "pytorch" else 3)
    own = save_models(tmp_path / "own", models.config, models.base, models.agents, shards=3)
    job = Job(entry, own, tmp_path)
    if entry == "pytorch":
        file = tmp_path / "1.safetensors"
        raw_pytorch.SimpleLoaderCache().loaders.clear()
        moment = (raw_pytorch.SimpleLoadTensor, "execute")
    else:
        file = sorted(Path(own.agent_paths[1]).glob("*-of-*"))[2]
        moment = (kernel._Stream, "count")
    content = file.read_bytes()
    function = getattr(*moment)

    def damaging(*args):
        if file.exists():
            # Not in place: readers have it mapped.
            file.unlink()
            if damage == "truncated":
                file.with_suffix(".new").write_bytes(content[:-100])
                file.with_suffix(".new").rename(file)
        return function(*args)

    with monkeypatch.context() as patch:
        patch.setattr(*moment, damaging)
        result = job.run()
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert str(file) in result.output
    assert not job.out.exists()
    job.assert_nothing_left()
    file.write_bytes(content)
    LoaderCache().loaders.clear()
    raw_pytorch.SimpleLoaderCache().loaders.clear()
    assert job.run().exit_code == 0
    job.assert_finished()


# --- NaN and infinity -----------------------------------------------------------------------------


UP = "model.layers.1.mlp.up_proj.weight"


def poisoned(models: Models, directory: Path, wrong: dict[int, list[float]]) -> Models:
    """The models with the values at the start of a tensor of some: −1 the
    base, 0 the first agent.
    """
    base, agents = dict(models.base), [dict(agent) for agent in models.agents]
    for place, values in wrong.items():
        weights = base if place == -1 else agents[place]
        weights[UP] = weights[UP].clone()
        weights[UP].view(-1)[: len(values)] = torch.tensor(values).to(weights[UP].dtype)
    return save_models(directory / "models", models.config, base, agents)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("place", [-1, 0, 2], ids=["base", "first", "last"])
@pytest.mark.parametrize("values", [[NAN], [INF, -INF], [-INF, NAN, INF]], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_not_finite_stop_the_merge(method, values, place, make_models, tmp_path):
    models = poisoned(make_models(), tmp_path, {place: values})
    message = refusal(models.recipe(method), tmp_path)
    model = models.base_path if place == -1 else models.agent_paths[place]
    assert f"NaN or infinity in {UP}: {len(values)} in {model}." in message
    assert "non_finite: ignore" in message


@pytest.mark.parametrize("method", METHODS)
def test_every_model_that_is_not_finite_is_named(method, make_models, tmp_path):
    wrong = {-1: [NAN], 0: [INF, INF], 2: [NAN, INF, NAN]}
    models = poisoned(make_models(dtypes=(BF16,) * 4), tmp_path, wrong)
    message = refusal(models.recipe(method), tmp_path)
    first, _, last = models.agent_paths
    assert f"1 in {models.base_path}, 2 in {first}, 3 in {last}" in message


@pytest.mark.parametrize("shared", ["mean", "ties", "drop"])
@pytest.mark.parametrize("method", METHODS)
def test_not_finite_is_seen_whatever_becomes_of_it(shared, method, make_models, tmp_path):
    models = poisoned(make_models(), tmp_path, {1: [NAN]})
    parameters = {"shared": shared, "keep_unique": False, "density": 0.5}
    assert UP in refusal(models.recipe(method, parameters=parameters), tmp_path)


@pytest.mark.parametrize("entry", ["multi", "pytorch"])
def test_not_finite_weights_stop_every_command(entry, make_models, tmp_path):
    models = poisoned(make_models(), tmp_path, {2: [NAN, NAN]})
    if entry == "pytorch":
        models.agents[2] = checkpoints.read(Path(models.agent_paths[2]))
    job = Job(entry, models, tmp_path)
    message = invoke_refused(job.command, *job.arguments)
    where = tmp_path / "2.safetensors" if entry == "pytorch" else models.agent_paths[2]
    assert f"NaN or infinity in {UP}: 2 in {where}." in message
    assert not job.out.exists()
    job.assert_nothing_left()
    if entry == "multi":
        assert (job.first / "config.json").exists()


def test_overflow_of_a_narrower_dtype_is_told(make_models, tmp_path):
    models = poisoned(make_models(), tmp_path, {0: [1e6]})
    merge(models.recipe("ram"), tmp_path)
    (tmp_path / "half").mkdir()
    message = refusal(models.recipe("ram", dtype="float16"), tmp_path / "half")
    assert f"{UP}: 1 in {models.agent_paths[0]}" in message
    assert "overflow" in message


@pytest.mark.parametrize("method", METHODS)
def test_not_finite_weights_pass_where_the_recipe_says_so(method, make_models, tmp_path):
    healthy = make_models()
    models = poisoned(healthy, tmp_path, {1: [NAN, INF, -INF]})
    output = merge(models.recipe(method, parameters={"non_finite": "ignore"}), tmp_path)
    assert not output[UP].view(-1)[:3].isfinite().any()
    assert output[UP].view(-1)[3:].isfinite().all()
    if method == "ram":
        expected = expect(method, plan(healthy.base, healthy.agents))
        name = "model.layers.0.mlp.up_proj.weight"
        expected[name].check(name, output[name])


def test_finite_weights_of_any_size_pass(make_models, tmp_path):
    largest = float(np.finfo(np.float32).max)
    models = poisoned(make_models(), tmp_path, {0: [largest], 1: [-largest]})
    output = merge(models.recipe("ram"), tmp_path)
    assert output[UP].view(-1)[0].isfinite()
