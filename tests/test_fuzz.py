"""Random whole recipes on random checkpoints: the oracle's result, or one clear error. No false
alarm, nothing half done.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st
from mergekit.io.tasks import LoaderCache
from mergekit.scripts import run_yaml

from mergekit_ram.cli import main as mergekit_ram
from mergekit_ram.report.record import Report
from support import checkpoints
from support.checkpoints import Weights
from support.expected import METHODS, Expected, expect, plan
from support.recipes import Models, save_models, write_recipe
from support.tensors import BF16, F16, F32, F64

DTYPES = {"float16": F16, "bfloat16": BF16, "float32": F32, "float64": F64}
SIZES = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
}
ARCHITECTURES = [
    ("qwen2", True),
    ("qwen2", False),
    ("llama", False),
    ("mistral", False),
    ("glm4", False),
]

SHARED_PARAMETERS = {
    "epsilon": st.sampled_from((0.0, 1e-5, "1e-5", 1e-3, [1e-5, 1e-4])),
    "normalize": st.booleans(),
    "lambda": st.sampled_from((1.0, 0.5, -1.0, 2)),
    "shared": st.sampled_from(("mean", "drop")),
    "r": st.sampled_from((0.0, 0.1, 1.0)),
    "alpha": st.sampled_from((0.0, 0.2, 10.0)),
    "ratio": st.sampled_from(("unique", "changed")),
}
AGENT_PARAMETERS = {
    "weight": st.sampled_from((1.0, 0.5, 3)),
    "keep_unique": st.booleans(),
}
# What no merge can use: the parameter, the value, and whether it is an agent's.
UNUSABLE = [
    ("epsilon", -1.0, False),
    ("epsilon", "tiny", False),
    ("lambda", math.nan, False),
    ("shared", "vote", False),
    ("weight", math.inf, True),
    ("density", 0.0, True),
    ("density", 2.0, True),
    ("keep_unique", "some", True),
]


class Case:
    """A recipe to run and what has to come of it.

    Attributes:
        raw: whether it is one of mergekit-pytorch.
        refused: what an error has to say, each part; nothing where the merge has to succeed.
        copied: tensors that are no floats.
    """

    # No dataclass: hypothesis would print every weight of them.
    def __init__(
        self,
        models: Models,
        recipe: dict,
        raw: bool,
        expected: Mapping[str, Expected],
        copied: Weights,
    ):
        self.models = models
        self.recipe = recipe
        self.raw = raw
        self.expected = expected
        self.copied = copied
        self.refused: list[str] = []

    def __repr__(self) -> str:
        return f"{self.recipe}, refused for {self.refused}"


NORM = "model.norm.weight"


# Each oddity breaks, or only strains, some files or the recipe of a case; it returns what an error
# has to say, if there has to be one.


def missing_tensor(case: Case, chance: random.Random) -> list[str]:
    i = chance.randrange(len(case.models.agents))
    name = f"model.layers.{chance.randrange(2)}.mlp.down_proj.weight"
    rewrite(case, i, lambda weights: weights.pop(name))
    return [name, case.models.agent_paths[i]]


def other_shape(case: Case, chance: random.Random) -> list[str]:
    i = chance.randrange(len(case.models.agents))

    def widen(weights):
        weights[NORM] = torch.cat([weights[NORM]] * 2)

    rewrite(case, i, widen)
    return ["another shape", NORM, case.models.agent_paths[i]]


def other_vocabulary(case: Case, chance: random.Random) -> list[str]:
    i = chance.randrange(len(case.models.agents))
    name = "model.embed_tokens.weight"
    rewrite(case, i, lambda w: w.update({name: torch.cat([w[name], w[name][:1]])}))
    told = ["another shape", name, case.models.agent_paths[i]]
    return told if case.raw else [*told, "tokenizer"]


def not_finite(case: Case, chance: random.Random) -> list[str]:
    i = chance.randrange(len(case.models.agents))
    value = chance.choice([math.nan, math.inf, -math.inf])

    def poison(weights):
        tensor = weights[NORM] = weights[NORM].clone()
        tensor[chance.randrange(len(tensor))] = value

    rewrite(case, i, poison)
    return ["NaN or infinity", NORM, case.models.agent_paths[i]]


def integers(case: Case, chance: random.Random) -> list[str]:
    i = chance.randrange(len(case.models.agents))
    rewrite(case, i, lambda w: w.update({NORM: w[NORM].to(torch.int32)}))
    if case.recipe.get("dtype") and not case.raw:
        return ["?"]  # mergekit casts them; whatever comes of it is not the oracle's
    return [NORM, case.models.agent_paths[i]]


def truncated(case: Case, chance: random.Random) -> list[str]:
    path = Path(chance.choice([case.models.base_path, *case.models.agent_paths]))
    if path.is_dir():
        files = [f for f in path.iterdir() if f.suffix in (".bin", ".safetensors")]
        path = chance.choice(sorted(files))
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])
    return [str(path)]


def corrupt_index(case: Case, chance: random.Random) -> list[str]:
    path = Path(chance.choice([case.models.base_path, *case.models.agent_paths]))
    files = list(path.glob("*.index.json")) if path.is_dir() else []
    if not files:
        return truncated(case, chance)
    content = files[0].read_text()
    files[0].write_text(content[: chance.randrange(len(content) - 1)])
    return [str(files[0])]


def corrupt_config(case: Case, chance: random.Random) -> list[str]:
    if case.raw:
        return truncated(case, chance)
    path = chance.choice([case.models.base_path, *case.models.agent_paths])
    config = Path(path) / "config.json"
    content = config.read_text()
    config.write_text(content[: chance.randrange(len(content) - 2)])
    return [path, "config"]


def agent_twice(case: Case, chance: random.Random) -> list[str]:
    i = chance.randrange(len(case.models.agents))
    path = case.models.agent_paths[i]
    case.recipe["models"].append({"model": chance.choice([path, path.replace("/m", "/./m")])})
    return ["same model", path]


def no_agent(case: Case, chance: random.Random) -> list[str]:
    case.recipe["models"] = [{"model": case.models.base_path}]
    return ["no agent besides the base"]


def no_base(case: Case, chance: random.Random) -> list[str]:
    del case.recipe["base_model"]
    return ["no base_model"]


def quantized(case: Case, chance: random.Random) -> list[str]:
    i = chance.randrange(len(case.models.agents))
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(case, i, lambda w: w.update({f"{name}_scale": torch.ones(1)}))
    return ["quantized", case.models.agent_paths[i]]


def unusable_parameter(case: Case, chance: random.Random) -> list[str]:
    name, value, of_agent = chance.choice(UNUSABLE)
    place = case.recipe["models"][-1] if of_agent else case.recipe
    place.setdefault("parameters", {})[name] = value
    return [f"{name}: {value!r}"]


BREAKING = [
    missing_tensor,
    other_shape,
    other_vocabulary,
    not_finite,
    integers,
    truncated,
    corrupt_index,
    corrupt_config,
    agent_twice,
    no_agent,
    no_base,
    quantized,
    unusable_parameter,
]


def rewrite(case: Case, agent: int, edit: Callable[[Weights], object]) -> None:
    """Save an agent again with other weights, in the files that it has."""
    path = Path(case.models.agent_paths[agent])
    if not path.is_dir():
        weights = checkpoints_of(path)
        edit(weights)
        checkpoints.save_state_dict(path, weights)
        return
    pickled = any(path.glob("*.bin*"))
    shards = max(1, len(list(path.glob("*-of-*"))))
    weights = checkpoints.read(path)
    edit(weights)
    config = case.models.config
    shutil.rmtree(path)
    checkpoints.save(path, config, weights, shards=shards, pickle=pickled)


def checkpoints_of(file: Path) -> Weights:
    if file.suffix == ".bin":
        return torch.load(file, weights_only=True)
    return checkpoints.load_file(file)


def drawn_models(draw, directory: Path) -> tuple[str, Models, Weights]:
    """An architecture or "files"; models on disk; their tensors that are no floats."""
    architecture, tied = draw(st.sampled_from(ARCHITECTURES))
    raw = draw(st.sampled_from((False, False, True)))
    pickled = draw(st.booleans())
    shards = draw(st.integers(1, 3))
    agents = draw(st.integers(1, 4))
    names = st.sampled_from(tuple(DTYPES)[:3])
    same = draw(st.one_of(st.none(), names))
    dtypes = [DTYPES[same or draw(names)] for _ in range(agents + 1)]

    sizes = {} if architecture == "glm4" else SIZES
    config, base = checkpoints.make_base(architecture, tied=tied, **sizes)
    fractions = st.sampled_from((0.0, 0.1, 0.5, 1.0))
    changed = [
        checkpoints.change(base, seed, fraction=draw(fractions), size=0.05)
        for seed in range(1, agents + 1)
    ]
    base, *changed = [
        checkpoints.cast(weights, dtype)
        for weights, dtype in zip([base, *changed], dtypes, strict=True)
    ]
    copied = {}
    if raw:
        extra = {
            "empty": torch.zeros(0, 3, dtype=dtypes[0]),
            "number": torch.tensor(1.5, dtype=dtypes[0]),
        }
        base, *changed = [{**weights, **extra} for weights in (base, *changed)]
        copied = {"steps": torch.tensor(7)}
    models = save(directory, config, base, changed, raw, shards, pickled, copied)
    return "files" if raw else architecture, models, copied


def drawn_parameters(draw, recipe: dict, raw: bool) -> Callable[[str], dict]:
    """Give a recipe parameters; what a tensor of a name is merged with, for the oracle."""
    names = draw(st.sets(st.sampled_from(sorted(SHARED_PARAMETERS)), max_size=4))
    if recipe["merge_method"] == "ram":
        names -= {"r", "alpha", "ratio"}
    shared = {name: draw(SHARED_PARAMETERS[name]) for name in sorted(names)}
    if raw and isinstance(shared.get("epsilon"), list):
        del shared["epsilon"]  # there are no layers to change it along
    if shared:
        recipe["parameters"] = shared
    of_agents = {}
    for name, values in AGENT_PARAMETERS.items():
        if draw(st.booleans()):
            of_agents[name] = [draw(values) for _ in recipe["models"]]
            for model, value in zip(recipe["models"], of_agents[name], strict=True):
                model.setdefault("parameters", {})[name] = value

    def parameters_of(name: str) -> dict:
        values = {{"lambda": "lambda_"}.get(k, k): v for k, v in shared.items()}
        epsilon = values.get("epsilon", 1e-5)
        if isinstance(epsilon, list):
            # From the first layer to the last, of two; the first also elsewhere.
            epsilon = epsilon["layers.1." in name]
        values["epsilon"] = float(epsilon)
        return {**values, **of_agents}

    return parameters_of


@st.composite
def recipes(draw, directory: Path, *, broken: bool) -> Case:
    kind, models, copied = drawn_models(draw, directory)
    raw = kind == "files"
    method = draw(st.sampled_from(METHODS))
    recipe = {
        "merge_method": method,
        "base_model": models.base_path,
        "models": [{"model": path} for path in models.agent_paths],
    }
    parameters_of = drawn_parameters(draw, recipe, raw)
    if draw(st.booleans()):
        recipe["models"].insert(0, {"model": models.base_path})
    for entry in ("dtype", "out_dtype"):
        if draw(st.booleans()):
            recipe[entry] = draw(st.sampled_from(tuple(DTYPES)))
    expected = expect(
        method,
        plan(models.base, models.agents, parameters_of),
        dtype=DTYPES.get(recipe.get("dtype")),
        out_dtype=DTYPES.get(recipe.get("out_dtype")),
    )
    event(f"{method}, {kind}")
    case = Case(models, recipe, raw, expected, copied)
    if broken:
        oddity = draw(st.sampled_from(BREAKING))
        event(oddity.__name__)
        case.refused = oddity(case, random.Random(draw(st.integers(0, 999))))
    return case


def save(directory, config, base, agents, raw, shards, pickled, copied) -> Models:
    if not raw:
        return save_models(directory / "m", config, base, agents, shards, pickled)
    suffix = ".bin" if pickled else ".safetensors"
    (directory / "m").mkdir()
    base_path, *paths = [
        checkpoints.save_state_dict(directory / "m" / f"{name}{suffix}", {**weights, **copied})
        for name, weights in [("base", base), *enumerate(agents)]
    ]
    return Models(config, base, agents, base_path, paths)


def run(command, *arguments) -> tuple[int, str]:
    """Exit code and output of a command that ends by itself, with an error message at worst."""
    result = CliRunner().invoke(command, [*map(str, arguments)])
    ended = result.exception is None or isinstance(result.exception, SystemExit)
    if not ended:
        raise AssertionError("a traceback for its user") from result.exception
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def try_case(case: Case, directory: Path) -> None:
    LoaderCache().loaders.clear()
    raw_pytorch.SimpleLoaderCache().loaders.clear()
    file, out = write_recipe(case.recipe, directory), directory / "merged"
    command = raw_pytorch.main if case.raw else run_yaml.main
    code, output = run(command, file, out)
    LoaderCache().loaders.clear()
    raw_pytorch.SimpleLoaderCache().loaders.clear()
    checked, found = run(mergekit_ram, "check", file)
    if case.refused == ["?"]:
        return
    if case.refused:
        assert code == 1, output
        assert output.count("Error: ") == 1, output
        for part in case.refused:
            assert part in output, part
        assert [p.name for p in directory.iterdir() if "merged" in p.name] == []
        # What only weights can show is not found by looking at headers.
        assert checked == (0 if "NaN or infinity" in case.refused else 1), found
        return
    assert code == 0, output
    assert checked == 0, found
    merged = checkpoints.read(out)
    Report.model_validate(json.loads((out / "ram_report.json").read_text()))
    for name, tensor in case.copied.items():
        assert torch.equal(merged.pop(name), tensor)
    assert merged.keys() == case.expected.keys()
    for name, tensor in merged.items():
        case.expected[name].check(name, tensor)


def examples(number: int) -> settings:
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("broken", [False, True], ids=["sound", "broken"])
@examples(30)
@given(st.data())
def test_recipe_gives_the_oracles_result_or_one_clear_error(broken, data):
    try_recipe(broken, data)


def try_recipe(broken: bool, data) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try_case(data.draw(recipes(directory, broken=broken)), directory)


@click.command()
@click.option("--cases", default=1000, show_default=True)
@click.option("--seed", "start", default=0, show_default=True)
def main(cases: int, start: int) -> None:
    """Try that many random recipes: python tests/test_fuzz.py --cases 1000"""
    torch.set_num_threads(1)
    tried = 0

    @seed(start)
    @settings(examples(cases), derandomize=False)
    @given(st.booleans(), st.data())
    def fuzz(broken, data):
        nonlocal tried
        try_recipe(broken, data)
        tried += 1

    begin = time.perf_counter()
    fuzz()
    seconds = time.perf_counter() - begin
    click.echo(f"{tried} recipes, {seconds:.0f} s, seed {start}")


if __name__ == "__main__":
    main()
