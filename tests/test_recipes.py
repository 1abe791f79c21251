"""Whole merges of small real checkpoints, through every entry point, against the float64 oracle
tensor by tensor.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import checkpoints
import mergekit.multigpu_executor
import mergekit.scripts.merge_raw_pytorch as raw_pytorch
import numpy as np
import oracle
import pytest
import torch
import transformers
import yaml
from checkpoints import Weights
from click.testing import CliRunner
from mergekit.architecture import get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.io.tasks import LoaderCache, LoadTensor
from mergekit.merge import _model_out_config
from mergekit.merge_methods import PerGroupValues, merge_state_dicts, merge_tensors
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.scripts import multimerge, run_yaml

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "example_yamls").glob("*.yml"))
METHODS = ("ram", "ramplus", "ramplus_tl")
# Strong enough that one tensor counted wrongly shows in a float32 result.
STRONG = {"r": 1.0, "alpha": 10.0}
RESCALING = ("r", "alpha", "ratio")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# --- What a merge should give ---------------------------------------------------------------------


@dataclasses.dataclass
class Planned:
    """One output tensor: what is merged into it, and the oracle's keywords for it."""

    base: torch.Tensor
    agents: Sequence[torch.Tensor]
    parameters: Mapping = dataclasses.field(default_factory=dict)


Plan = dict[str, Planned]


def plan(
    base: Weights,
    agents: Sequence[Weights],
    parameters: Mapping | Callable[[str], Mapping] | None = None,
) -> Plan:
    """Every tensor of the base with every agent's. An agent without a tensor counts as one that
    left it as it is.
    """
    of = parameters if callable(parameters) else lambda _: parameters or {}
    return {
        name: Planned(tensor, [agent.get(name, tensor) for agent in agents], of(name))
        for name, tensor in base.items()
    }


@dataclasses.dataclass
class Expected:
    base: torch.Tensor
    merged: oracle.Merged
    dtype: torch.dtype
    wide: bool

    def check(self, name: str, got: torch.Tensor) -> None:
        assert got.dtype == self.dtype, name
        assert got.shape == self.base.shape, name
        inactive = torch.as_tensor(self.merged.changers == 0)
        kept = self.base.to(self.dtype)
        assert torch.equal(bits(got)[inactive], bits(kept)[inactive]), (
            f"{name}: elements that no agent changed lost the base's bits"
        )
        error = np.abs(array(got) - self.merged.value)
        allowed = (2.0**-50 if self.wide else 2.0**-22) * self.merged.magnitude
        if self.dtype != F64:
            allowed = allowed + 0.51 * oracle.ulp(self.merged.value, dtype_name(self.dtype))
        wrong = (error > allowed) & ~self.merged.contested
        assert not wrong.any(), (
            f"{name}: {wrong.sum()} of {wrong.size} elements are wrong, "
            f"by up to {np.max(error[wrong] / allowed[wrong]):.3g} times the tolerance"
        )


def expect(
    method: str,
    planned: Plan,
    *,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> dict[str, Expected]:
    """Evaluate a plan in float64, the ratio over the whole of it if the method is ``ramplus``."""
    inputs = {}
    for name, tensor in planned.items():
        tensors = [tensor.base, *tensor.agents]
        tensors = [t.to(dtype) if dtype else t for t in tensors]
        inputs[name] = tensors
    arrays = {name: [array(t) for t in tensors] for name, tensors in inputs.items()}
    counts = {
        name: oracle.overlap(base, agents, **selection(planned[name].parameters))
        for name, (base, *agents) in arrays.items()
    }
    over_model = sum_counts(counts)
    expected = {}
    for name, (base, *agents) in arrays.items():
        parameters = dict(planned[name].parameters)
        rescaling = {key: parameters.pop(key) for key in RESCALING if key in parameters}
        if method != "ram":
            scope = over_model if method == "ramplus" else counts[name]
            parameters["factors"] = oracle.rescaling(scope, **rescaling)
        dtypes = [tensor.dtype for tensor in inputs[name]]
        promoted = dtypes[0]
        for other in dtypes[1:]:
            promoted = torch.promote_types(promoted, other)
        expected[name] = Expected(
            base=inputs[name][0],
            merged=oracle.ram(base, agents, **parameters),
            dtype=out_dtype or promoted,
            wide=F64 in (*dtypes, out_dtype),
        )
    return expected


def selection(parameters: Mapping) -> dict:
    return {key: parameters[key] for key in ("epsilon", "weight", "normalize") if key in parameters}


def sum_counts(counts: Mapping[str, oracle.Overlap]) -> oracle.Overlap:
    first, *others = counts.values()
    for other in others:
        first = first + other
    return first


def overlap_of(planned: Plan) -> oracle.Overlap:
    return sum_counts(
        {
            name: oracle.overlap(
                array(tensor.base),
                [array(agent) for agent in tensor.agents],
                **selection(tensor.parameters),
            )
            for name, tensor in planned.items()
        }
    )


def check(output: Weights, expected: Mapping[str, Expected]) -> None:
    assert output.keys() == expected.keys()
    for name, tensor in expected.items():
        tensor.check(name, output[name])


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(F64).numpy()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layer_of(name: str) -> int | None:
    found = re.search(r"(?:layers|block)\.(\d+)\.", name)
    return int(found[1]) if found else None


def gradient(values: Sequence[float], name: str, layers: int) -> float:
    """A gradient's value in one tensor; what stands before and after the layers takes the first
    value.
    """
    layer = layer_of(name)
    t = 0 if layer is None else layer / (layers - 1)
    return float(np.interp(t, np.linspace(0, 1, len(values)), values))


# --- Checkpoints and merges -----------------------------------------------------------------------


@dataclasses.dataclass
class Models:
    """A base and its agents: their weights as saved, and their paths."""

    config: transformers.PretrainedConfig
    base: Weights
    agents: list[Weights]
    base_path: str
    agent_paths: list[str]

    def recipe(self, method: str, *, agents: Sequence[Mapping] = (), **entries) -> dict:
        """A recipe that merges all agents.

        Args:
            agents: parameters of the first, second, … agent.
            entries: the recipe's other entries; ``parameters`` among them.
        """
        models = [{"model": path} for path in self.agent_paths]
        for model, parameters in zip(models, agents, strict=False):
            if parameters:
                model["parameters"] = dict(parameters)
        return {
            "merge_method": method,
            "base_model": self.base_path,
            "models": models,
            **entries,
        }


@pytest.fixture(scope="module")
def make_models(tmp_path_factory) -> Callable[..., Models]:
    made = {}

    def make(
        architecture="qwen2",
        *,
        tied=True,
        dtypes: Sequence[torch.dtype] = (F32,) * 4,
        shards=1,
        pickle=False,
        **sizes,
    ) -> Models:
        key = (architecture, tied, tuple(dtypes), shards, pickle, *sizes.items())
        if key in made:
            return made[key]
        directory = tmp_path_factory.mktemp(architecture)
        config, base = checkpoints.make_base(architecture, tied=tied, **sizes)
        agents = [
            checkpoints.change(base, seed, fraction=0.1 * (1 + seed))
            for seed in range(1, len(dtypes))
        ]
        base, *agents = [
            checkpoints.cast(weights, dtype)
            for weights, dtype in zip([base, *agents], dtypes, strict=True)
        ]
        made[key] = save_models(directory, config, base, agents, shards, pickle)
        return made[key]

    return make


def save_models(directory: Path, config, base: Weights, agents, shards=1, pickle=False) -> Models:
    def write(name, weights):
        return checkpoints.save(directory / name, config, weights, shards=shards, pickle=pickle)

    paths = [write(f"agent{i}", agent) for i, agent in enumerate(agents)]
    return Models(config, base, list(agents), write("base", base), paths)


@pytest.fixture(autouse=True)
def forget_loaders():
    """Mergekit keeps every checkpoint it has opened; relative paths mean other files in the next
    test.
    """
    yield
    LoaderCache().loaders.clear()
    raw_pytorch.SimpleLoaderCache().loaders.clear()


def invoke(command, *arguments) -> str:
    """Run a command in this process; its output. Whatever it raises comes out."""
    result = CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def invoke_refused(command, *arguments) -> str:
    """Run a command that must end with an error message for its user; the message."""
    result = CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output


def slice_recipe(recipe: dict, models: Models, places: Sequence[tuple]) -> None:
    """Have a recipe take slices: for each, the layers ``[first, last + 1]`` of the base and of some
    agents.
    """
    del recipe["models"]
    recipe["slices"] = [
        {
            "sources": [
                {"model": path, "layer_range": list(layers)}
                for path in (
                    models.base_path,
                    *(models.agent_paths[i] for i in members),
                )
            ]
        }
        for layers, members in places
    ]


def write_recipe(recipe: Mapping | str, directory: Path) -> Path:
    file = directory / "recipe.yml"
    file.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe))
    return file


def merge(recipe: Mapping | str, directory: Path, *options: str) -> Weights:
    """Run ``mergekit-yaml`` in this process."""
    out = directory / "merged"
    invoke(run_yaml.main, write_recipe(recipe, directory), out, *options)
    return checkpoints.read(out)


def refusal(recipe: Mapping | str, directory: Path, *options: str) -> str:
    """Run ``mergekit-yaml`` on a recipe that it must refuse; its message."""
    out = directory / "merged"
    message = invoke_refused(run_yaml.main, write_recipe(recipe, directory), out, *options)
    assert not out.exists()
    assert [p.name for p in directory.iterdir() if "partial" in p.name] == []
    return message


def plan_recipe(recipe: Mapping, options: MergeOptions | None = None) -> MergePlanner:
    options = options or MergeOptions(quiet=True)
    config = MergeConfiguration.model_validate(recipe)
    architecture = get_architecture_info(config, options)
    out_config = _model_out_config(config, architecture)
    return MergePlanner(config, architecture, options, out_config)


def merge_in_memory(recipe: Mapping) -> Weights:
    tasks = plan_recipe(recipe).plan_in_memory()
    results = Executor(tasks).run(quiet=True)
    return {task.weight_info.name: tensor for task, tensor in results}


def run_command(*command, cwd=None, **environment) -> str:
    """Run a command in a process of its own; its output."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(name: str) -> Path:
    """A command that pip put beside this interpreter."""
    return Path(sys.executable).with_name(name)


LOGGED = re.compile(r"changed (\d+) of (\d+) elements: (\d+) unique, (\d+) shared")


def logged_counts(text: str) -> list[tuple[int, int, int]]:
    """(changed, unique, shared) of every agent, as ``ramplus`` logs it."""
    return [tuple(map(int, found.group(1, 3, 4))) for found in LOGGED.finditer(text)]


def logged_totals(text: str) -> set[int]:
    """The elements that the agents' changes were counted among."""
    return {int(found[2]) for found in LOGGED.finditer(text)}


def true_counts(planned: Plan) -> list[tuple[int, int, int]]:
    counts = overlap_of(planned)
    columns = zip(counts.changed, counts.unique, counts.shared, strict=True)
    return [tuple(map(int, row)) for row in columns]


def total_elements(weights: Weights) -> int:
    return sum(tensor.numel() for tensor in weights.values())


def test_oracle_comparison_sees_a_millionth_and_a_sign_bit(make_models):
    models = make_models()
    planned = plan(models.base, models.agents, STRONG)
    expected = expect("ramplus", planned)["model.norm.weight"]
    right = torch.from_numpy(expected.merged.value).to(F32)
    expected.check("right", right)

    size = np.abs(expected.merged.value) * (expected.merged.changers > 0)
    wrong = right.clone()
    wrong[int(np.argmax(size))] *= 1 + 2**-20
    with pytest.raises(AssertionError, match="1 of"):
        expected.check("wrong", wrong)

    element = int(np.argmax((expected.merged.changers == 0) & (array(right) == 0)))
    wrong = right.clone()
    wrong[element] = 0.0
    with pytest.raises(AssertionError, match="bits"):
        expected.check("wrong", wrong)


def test_model_wide_ratio_differs_visibly_from_tensor_local_and_from_one_tensor_more(
    make_models,
):
    models = make_models()
    planned = plan(models.base, models.agents, STRONG)
    wide = expect("ramplus", planned)
    local = expect("ramplus_tl", planned)
    twice = expect("ramplus", {**planned, "again": planned["model.embed_tokens.weight"]})
    for other in (local, twice):
        name = "model.layers.0.mlp.up_proj.weight"
        output = torch.from_numpy(other[name].merged.value).to(F32)
        with pytest.raises(AssertionError, match="are wrong"):
            wide[name].check(name, output)


# --- Example recipes ------------------------------------------------------------------------------

LAYERS = 4
NAMES = ("coder", "tool_user", "reader")


def example_filters(name: str) -> dict:
    return {
        "weight": [
            gradient([1.0, 0.5, 0.25], name, LAYERS),
            2.0 if "self_attn" in name else 1.0,
            1.0,
        ],
        "keep_unique": [True, True, "mlp" not in name],
        "epsilon": 1e-2 if "embed_tokens" in name else 1e-5,
        "r": gradient([0.1, 0.4], name, LAYERS),
    }


def example_ties_weights(name: str) -> dict:
    return {
        "weight": [
            1.0,
            gradient([0, 0.3, 0.7, 1], name, LAYERS),
            0.5 if "mlp" in name else 0.0,
        ]
    }


def example_slices(base: Weights, agents: Sequence[Weights]) -> Plan:
    planned = {}
    for name, tensor in base.items():
        coder, tool_user, reader = (agent[name] for agent in agents)
        late = name == "model.norm.weight" or (layer_of(name) or 0) >= 2
        merged = [coder, tensor, reader] if late else [coder, tool_user, tensor]
        planned[name] = Planned(tensor, merged, {"lambda_": 0.8} if late else {})
    return planned


# Example → method and oracle's parameters, or its whole plan.
EXPECTED_EXAMPLES = {
    "ram": ("ram", {}),
    "ramplus": ("ramplus", {"r": 0.1, "alpha": 0.2, "epsilon": 1e-5}),
    "ramplus_tl": ("ramplus_tl", {"r": 0.1, "alpha": 0.2}),
    "weights": ("ram", {"weight": [2.0, 1.0, 0.5], "lambda_": 0.9}),
    "filters_and_gradients": ("ramplus", example_filters),
    "slices": ("ramplus", example_slices),
    "from_ties_to_ram": ("ram", example_ties_weights),
    "arm": ("ram", {}),
    "arm_r": ("ramplus", {"r": 0.2, "alpha": 1, "ratio": "changed"}),
    "arm_r_v2": ("ramplus", {"r": 0.2, "alpha": 1}),
    "arm_ties": ("ram", {"shared": "ties", "density": [0.1] * 3}),
    "arm_unique": (
        "ram",
        {"shared": "drop", "keep_unique": [True, False, False], "lambda_": 1 / 3},
    ),
}
AUTHORS = {
    "arm": oracle.arm,
    "arm_r": lambda base, agents: oracle.arm_r(base, agents, 1.2),
    "arm_r_v2": lambda base, agents: oracle.arm_r_v2(base, agents, 1.2),
    "arm_ties": oracle.arm_ties,
    "arm_unique": lambda base, agents: oracle.arm_unique(base, agents, 0),
}


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> tuple[Path, Weights, list[Weights]]:
    """The directory that holds the examples' checkpoints, the base's weights and the agents'."""
    directory = tmp_path_factory.mktemp("examples")
    command = ROOT / "example_yamls" / "make_agents.py"
    run_command(sys.executable, command, "agents", cwd=directory)
    base, *agents = [checkpoints.read(directory / "agents" / name) for name in ("base", *NAMES)]
    return directory, base, agents


def expect_example(name: str, base: Weights, agents: Sequence[Weights]):
    method, parameters = EXPECTED_EXAMPLES[name]
    if parameters is example_slices:
        return expect(method, example_slices(base, agents), dtype=BF16)
    return expect(method, plan(base, agents, parameters), dtype=BF16)


def test_every_example_has_an_expectation():
    assert {file.stem for file in EXAMPLES} == EXPECTED_EXAMPLES.keys()


def test_example_agents_change_a_fifth_of_the_elements_and_overlap_partly(example):
    _, base, agents = example
    assert base["model.embed_tokens.weight"].dtype == BF16
    counts = overlap_of(plan(base, agents))
    for changed, unique in zip(counts.changed, counts.unique, strict=True):
        assert 0.15 < changed / counts.total < 0.25
        assert 0.3 < unique / changed < 0.7


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_recipe_gives_what_it_says(file, example, tmp_path, monkeypatch):
    directory, base, agents = example
    monkeypatch.chdir(directory)
    invoke(run_yaml.main, file, tmp_path / "merged")
    output = checkpoints.read(tmp_path / "merged")
    check(output, expect_example(file.stem, base, agents))
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    if file.stem in AUTHORS:
        check_like_the_authors(AUTHORS[file.stem], output, base, agents)


def check_like_the_authors(authors, output: Weights, base: Weights, agents) -> None:
    """Equal to the authors' formulas, rounded to bfloat16, wherever float32 decides as float64
    does.
    """
    arrays = [
        {name: array(tensor) for name, tensor in weights.items()} for weights in (base, *agents)
    ]
    for name, theirs in authors(arrays[0], arrays[1:]).items():
        size = sum(np.abs(weights[name]) for weights in arrays)
        allowed = 0.51 * oracle.ulp(theirs, "bfloat16") + 2.0**-22 * size
        assert np.all(np.abs(array(output[name]) - theirs) <= allowed), name


def test_mergekit_yaml_command_merges_an_example_that_transformers_loads(example, tmp_path):
    directory, base, agents = example
    recipe = ROOT / "example_yamls" / "ramplus.yml"
    text = run_command(script("mergekit-yaml"), recipe, tmp_path / "merged", "-v", cwd=directory)
    check(checkpoints.read(tmp_path / "merged"), expect_example("ramplus", base, agents))
    assert logged_counts(text) == true_counts(plan(base, agents))
    assert "Measuring overlap" in text

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    logits = model(**tokenizer("merge the agents", return_tensors="pt")).logits
    assert model.dtype == BF16 and logits.isfinite().all()


# --- Checkpoints of all kinds ---------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("architecture", "tied", "shards", "pickle"),
    [
        ("qwen2", True, 1, False),
        ("qwen2", False, 3, False),
        ("llama", False, 1, True),
        ("llama", True, 3, True),
        ("mistral", False, 3, False),
        ("gemma2", True, 1, True),
        ("t5", True, 2, False),
    ],
)
def test_checkpoint_merges_whatever_its_architecture_and_files(
    architecture, tied, shards, pickle, method, make_models, tmp_path
):
    models = make_models(architecture, tied=tied, shards=shards, pickle=pickle)
    parameters = STRONG if method != "ram" else {}
    output = merge(models.recipe(method, parameters=parameters), tmp_path)
    check(output, expect(method, plan(models.base, models.agents, parameters)))


@pytest.mark.parametrize(
    "options",
    [
        ["--lazy-unpickle"],
        ["--no-safe-serialization", "--out-shard-size", "3000"],
        ["--low-cpu-memory", "--read-to-gpu", "--async-write", "--clone-tensors"],
        ["--device", "cpu", "--quiet", "--num-threads", str(torch.get_num_threads())],
    ],
    ids=" ".join,
)
def test_merge_options_do_not_change_the_result(options, make_models, tmp_path, monkeypatch):
    # It can be set once in a process, and other tests may have done so.
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda threads: None)
    models = make_models("llama", tied=False, pickle=True)
    output = merge(models.recipe("ramplus", parameters=STRONG), tmp_path, *options)
    check(output, expect("ramplus", plan(models.base, models.agents, STRONG)))


def test_garbage_collection_spares_the_imports_once_a_process_and_for_our_methods_only(
    make_models, tmp_path, monkeypatch
):
    frozen = []
    monkeypatch.setattr(sys, "argv", ["mergekit-yaml"])
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))
    models = make_models()
    for method, times in (("task_arithmetic", 0), ("ram", 1), ("ramplus", 1)):
        recipe = models.recipe(method, agents=[{"weight": 1.0}] * len(models.agents))
        merge(recipe, tmp_path)
        assert len(frozen) == times


def test_progress_of_the_counting_pass_is_shown_unless_quiet(make_models, tmp_path):
    models = make_models()
    file = write_recipe(models.recipe("ramplus"), tmp_path)
    shown = invoke(run_yaml.main, file, tmp_path / "shown")
    quiet = invoke(run_yaml.main, file, tmp_path / "quiet", "--quiet")
    assert "Measuring overlap" in shown and "Executing graph" in shown
    assert "Measuring overlap" not in quiet and "%|" not in quiet


DTYPES = {
    "float32 as bfloat16": ((F32, F32, F32), BF16, None),
    "float32 as float16": ((F32, F32, F32), F16, None),
    "float32, saved as bfloat16": ((F32, F32, F32), F32, BF16),
    "float32 without dtype, saved as bfloat16": ((F32, F32, F32), None, BF16),
    "bfloat16 as float32": ((BF16, BF16, BF16), F32, None),
    "bfloat16, saved as float32": ((BF16, BF16, BF16), BF16, F32),
    "bfloat16 without dtype, saved as float32": ((BF16, BF16, BF16), None, F32),
    "float32 as bfloat16, saved as float32": ((F32, F32, F32), BF16, F32),
    "bfloat16, saved as float16": ((BF16, BF16, BF16), BF16, F16),
    "float64": ((F64, F64, F64), None, None),
    "float64, saved as bfloat16": ((F64, F64, F64), F64, BF16),
    "mixed": ((BF16, F32, F16), None, None),
    "mixed 16-bit": ((F16, BF16, F16), None, None),
    "mixed, saved as bfloat16": ((BF16, F32, F16), None, BF16),
    "mixed with float64": ((F32, F64, BF16), None, None),
    "mixed as bfloat16": ((F32, BF16, F16), BF16, None),
}


@pytest.mark.parametrize("method", ["ram", "ramplus"])
@pytest.mark.parametrize("case", DTYPES)
def test_result_is_rounded_once_to_the_output_dtype(case, method, make_models, tmp_path):
    dtypes, dtype, out_dtype = DTYPES[case]
    models = make_models("qwen2", dtypes=dtypes)
    recipe = models.recipe(method)
    if dtype:
        recipe["dtype"] = dtype_name(dtype)
    if out_dtype:
        recipe["out_dtype"] = dtype_name(out_dtype)
    output = merge(recipe, tmp_path)
    planned = plan(models.base, models.agents)
    check(output, expect(method, planned, dtype=dtype, out_dtype=out_dtype))


def test_builtin_recipes_give_the_builtin_result(make_models, tmp_path):
    """Mergekit's own methods in a process without the plugin, the plugin's in this one, on the same
    recipes.
    """
    models = make_models("qwen2", tied=False)
    recipes = {
        "ram": models.recipe("ram", parameters={"epsilon": "5e-3"}, dtype="float32"),
        "ramplus_tl": models.recipe("ramplus_tl", parameters=STRONG, dtype="float32"),
        "default": models.recipe("ramplus_tl"),
        "bfloat16": models.recipe("ram", dtype="bfloat16"),
    }
    files = []
    for name, recipe in recipes.items():
        (tmp_path / name).mkdir()
        files.append(write_recipe(recipe, tmp_path / name))
    code = (
        "import sys, pathlib\n"
        "from mergekit.scripts.run_yaml import main\n"
        "import mergekit.merge_methods as methods\n"
        "assert 'mergekit_ram' not in sys.modules\n"
        "assert 'ramplus' not in methods.registry._METHODS\n"
        "for file in sys.argv[1:]:\n"
        "    out = str(pathlib.Path(file).parent / 'builtin')\n"
        "    main([file, out, '--quiet'], standalone_mode=False)\n"
    )
    run_command(sys.executable, "-c", code, *files, MERGEKIT_RAM_DISABLE="1")

    for name, recipe in recipes.items():
        ours = merge(recipe, tmp_path / name)
        theirs = checkpoints.read(tmp_path / name / "builtin")
        assert ours.keys() == theirs.keys()
        # The built-in rounds to bfloat16 after every step.
        tolerance = 2.0**-7 if name == "bfloat16" else 2.0**-21
        for tensor in ours:
            size = models.base[tensor].abs() + sum(
                (agent[tensor] - models.base[tensor]).abs() for agent in models.agents
            )
            error = (ours[tensor].double() - theirs[tensor].double()).abs()
            assert ours[tensor].dtype == theirs[tensor].dtype
            assert bool((error <= tolerance * size).all()), (name, tensor)


# --- Parameters -----------------------------------------------------------------------------------


def test_filters_and_gradients_reach_every_parameter(make_models, tmp_path):
    models = make_models("llama", tied=False, num_hidden_layers=4)
    parameters = {
        "epsilon": [1e-2, 1e-5],
        "lambda": [{"filter": "mlp", "value": [1.0, 0.5]}, {"value": 1.5}],
        "normalize": [{"filter": "self_attn", "value": False}, {"value": True}],
        "shared": [
            {"filter": "q_proj", "value": "ties"},
            {"filter": "lm_head", "value": "drop"},
            {"value": "mean"},
        ],
        "r": [{"filter": "layers.2.", "value": 2.0}, {"value": 0.5}],
        "alpha": [10.0, 5.0],
        "ratio": [{"filter": "norm", "value": "changed"}, {"value": "unique"}],
    }
    agents = [
        {"weight": [0.5, 2.0], "density": [{"filter": "q_proj", "value": 0.3}]},
        {"keep_unique": [{"filter": "down_proj", "value": False}]},
        {"weight": [{"filter": "embed", "value": 3.0}, {"value": [1.0, 2.0, 0.25]}]},
    ]

    def parameters_of(name: str) -> dict:
        shared = {"q_proj": "ties", "lm_head": "drop"}
        return {
            "epsilon": gradient([1e-2, 1e-5], name, 4),
            "lambda_": gradient([1.0, 0.5], name, 4) if "mlp" in name else 1.5,
            "normalize": "self_attn" not in name,
            "shared": next((v for k, v in shared.items() if k in name), "mean"),
            "r": 2.0 if "layers.2." in name else 0.5,
            "alpha": gradient([10.0, 5.0], name, 4),
            "ratio": "changed" if "norm" in name else "unique",
            "weight": [
                gradient([0.5, 2.0], name, 4),
                1.0,
                3.0 if "embed" in name else gradient([1.0, 2.0, 0.25], name, 4),
            ],
            "density": [0.3 if "q_proj" in name else 1.0, 1.0, 1.0],
            "keep_unique": [True, "down_proj" not in name, True],
        }

    recipe = models.recipe("ramplus", agents=agents, parameters=parameters)
    output = merge(recipe, tmp_path)
    check(output, expect("ramplus", plan(models.base, models.agents, parameters_of)))


def test_epsilon_by_filter_counts_each_tensor_with_its_own(make_models, tmp_path, caplog):
    models = make_models()
    epsilon = [{"filter": "mlp", "value": 2e-2}, {"value": 1e-2}]
    recipe = models.recipe("ramplus", parameters={**STRONG, "epsilon": epsilon})

    def parameters_of(name):
        return {**STRONG, "epsilon": 2e-2 if "mlp" in name else 1e-2}

    planned = plan(models.base, models.agents, parameters_of)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(recipe, tmp_path)
    assert logged_counts(caplog.text) == true_counts(planned)
    check(output, expect("ramplus", planned))


def test_epsilon_in_scientific_notation_is_a_number(make_models, tmp_path):
    models = make_models()
    recipe = yaml.safe_dump(models.recipe("ram")) + "parameters:\n  epsilon: 1e-2\n"
    assert yaml.safe_load(recipe)["parameters"]["epsilon"] == "1e-2"
    output = merge(recipe, tmp_path)
    check(output, expect("ram", plan(models.base, models.agents, {"epsilon": 1e-2})))


def test_base_among_the_models_is_no_agent(make_models, tmp_path):
    models = make_models()
    recipe = models.recipe("ramplus", parameters=STRONG)
    # Parameters of the base have no meaning, and do no harm.
    base = {"model": models.base_path, "parameters": {"weight": 7.0, "density": 0.5}}
    recipe["models"].insert(1, base)
    check(
        merge(recipe, tmp_path),
        expect("ramplus", plan(models.base, models.agents, STRONG)),
    )


def test_weights_without_normalization_scale_before_the_threshold(make_models, tmp_path):
    models = make_models()
    weight = [0.25, 1.0, -2.0]
    recipe = models.recipe(
        "ramplus",
        agents=[{"weight": w} for w in weight],
        parameters={**STRONG, "normalize": False, "epsilon": 5e-3},
    )
    parameters = {**STRONG, "normalize": False, "epsilon": 5e-3, "weight": weight}
    output = merge(recipe, tmp_path)
    check(output, expect("ramplus", plan(models.base, models.agents, parameters)))


TIES_AND_DARE = {
    "ties": {"normalize": True, "int8_mask": True},
    "dare_ties": {"int8_mask": True, "rescale": False, "lambda": 0.5},
    "dare_linear": {"normalize": False, "lambda": 0.7},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("written_for", TIES_AND_DARE)
def test_ties_and_dare_recipes_need_only_another_method(written_for, method, make_models, tmp_path):
    models = make_models("mistral", tied=False, num_hidden_layers=4)
    recipe = models.recipe(
        written_for,
        agents=[
            {"density": [1, 0.7, 0.1], "weight": 1.0},
            {"density": 0.5, "weight": [0, 0.3, 0.7, 1]},
            {
                "density": 0.33,
                "weight": [{"filter": "mlp", "value": 0.5}, {"value": 0}],
            },
        ],
        parameters=TIES_AND_DARE[written_for],
        dtype="bfloat16",
    )
    if method == METHODS[0]:
        # It is a recipe of that method.
        (tmp_path / "original").mkdir()
        original = merge(recipe, tmp_path / "original", "--random-seed", "1")
        assert original.keys() == models.base.keys()

    def parameters_of(name: str) -> dict:
        settings = TIES_AND_DARE[written_for]
        return {
            "weight": [
                1.0,
                gradient([0, 0.3, 0.7, 1], name, 4),
                0.5 if "mlp" in name else 0.0,
            ],
            "lambda_": settings.get("lambda", 1.0),
            "normalize": settings.get("normalize", True),
        }

    output = merge({**recipe, "merge_method": method}, tmp_path)
    planned = plan(models.base, models.agents, parameters_of)
    check(output, expect(method, planned, dtype=BF16))


# --- Parameters that no merge can use -------------------------------------------------------------

NAN, INFINITE = float("nan"), float("inf")
INVALID = [
    ("ram", {"epsilon": -1e-6}, [], ["epsilon", "-1e-06"]),
    ("ram", {"epsilon": NAN}, [], ["epsilon", "nan"]),
    ("ram", {"epsilon": "small"}, [], ["epsilon", "small"]),
    ("ram", {"lambda": INFINITE}, [], ["lambda", "inf"]),
    ("ram", {"lambda": NAN}, [], ["lambda", "nan"]),
    ("ram", {"shared": "median"}, [], ["shared", "median"]),
    ("ram", {"normalize": "maybe"}, [], ["normalize", "maybe"]),
    ("ram", {}, [{"density": 0.0}], ["density", "0.0"]),
    ("ram", {}, [{"density": 1.25}], ["density", "1.25"]),
    ("ram", {}, [{"density": NAN}], ["density", "nan"]),
    ("ram", {}, [{"weight": NAN}], ["weight", "nan"]),
    ("ram", {}, [{"keep_unique": "perhaps"}], ["keep_unique", "perhaps"]),
    ("ram", {"weight": 0}, [], ["weight", "0"]),
    ("ram", {}, [{"weight": 1}, {"weight": -1}], ["weight", "-1"]),
    ("ram", {"epsilon": [1e-5, -1.0]}, [], ["epsilon", "-1.0"]),
    ("ramplus", {"r": -0.5}, [], ["r: -0.5"]),
    ("ramplus", {"r": NAN}, [], ["r: nan"]),
    ("ramplus", {"alpha": -0.25}, [], ["alpha", "-0.25"]),
    ("ramplus", {"ratio": "both"}, [], ["ratio", "both"]),
    ("ramplus_tl", {"r": -0.5}, [], ["r: -0.5"]),
    ("ramplus_tl", {"alpha": NAN}, [], ["alpha", "nan"]),
]


@pytest.fixture
def no_weight_is_read(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(LoadTensor, "execute", refuse)
    monkeypatch.setattr(raw_pytorch.SimpleLoadTensor, "execute", refuse)


@pytest.mark.parametrize(("method", "parameters", "agents", "told"), INVALID)
def test_invalid_parameter_is_refused_before_a_weight_is_read(
    method, parameters, agents, told, make_models, tmp_path, no_weight_is_read
):
    models = make_models()
    recipe = models.recipe(method, parameters=parameters, agents=agents)
    message = refusal(recipe, tmp_path)
    for part in (method, *told, "(in model."):
        assert part in message


def test_problems_in_different_tensors_come_in_one_error(make_models, tmp_path, no_weight_is_read):
    models = make_models()
    recipe = models.recipe(
        "ramplus",
        parameters={
            "epsilon": [{"filter": "q_proj", "value": -1.0}, {"value": 1e-5}],
            "alpha": [{"filter": "layers.1.mlp.up_proj", "value": -2.0}, {"value": 1}],
        },
        agents=[
            {"density": [{"filter": "k_proj", "value": 3.0}, {"value": 1}]},
            {"weight": [{"filter": "embed_tokens", "value": 0}, {"value": 1}]},
            {"weight": [{"filter": "embed_tokens", "value": 0}, {"value": 1}]},
        ],
    )
    recipe["models"][0]["parameters"]["weight"] = 0
    lines = refusal(recipe, tmp_path).splitlines()
    for parts in (
        ["epsilon", "-1.0", "q_proj"],
        ["alpha", "-2.0", "layers.1.mlp.up_proj"],
        ["density", "3.0", "k_proj"],
        ["weight", "0", "embed_tokens"],
    ):
        assert any(all(part in line for part in parts) for line in lines), parts


def test_invalid_parameter_is_refused_by_every_entry_point(
    make_models, tmp_path, no_weight_is_read
):
    models = make_models()
    recipe = models.recipe("ramplus", parameters={"r": -1.0})
    name = "model.embed_tokens.weight"
    told = r"r: -1\.0.*model\."
    with pytest.raises(ValueError, match=told):
        plan_recipe(recipe).plan_in_memory()
    with pytest.raises(ValueError, match=told):
        merge_state_dicts(
            {"base": models.base, 0: models.agents[0]},
            "ramplus",
            base="base",
            parameters={"r": -1.0},
        )
    with pytest.raises(ValueError, match=rf"r: -1\.0.*{name}"):
        merge_tensors(
            [models.base[name], models.agents[0][name]],
            "ramplus",
            base_index=0,
            name=name,
            parameters={"r": -1.0},
        )
    raw = raw_recipe(tmp_path, models.base, models.agents, "ramplus", r=-1.0)
    message = invoke_refused(raw_pytorch.main, write_recipe(raw, tmp_path), tmp_path / "merged")
    assert re.search(told, message)
    assert not (tmp_path / "merged").exists()
    multi = yaml.safe_dump_all([{"name": "first", **recipe}])
    file = tmp_path / "multi.yml"
    file.write_text(multi)
    message = invoke_refused(multimerge.main, file, "-I", tmp_path / "steps")
    assert re.search(told, message)
    assert not (tmp_path / "steps" / "first").exists()


def test_agents_are_needed_only_where_there_is_a_base(make_models, tmp_path):
    models = make_models()
    recipe = models.recipe("ramplus")
    del recipe["base_model"]
    assert "no base_model" in refusal(recipe, tmp_path)


# --- Slices, modules, tokenizers ------------------------------------------------------------------


def test_layer_used_twice_counts_once_per_output_tensor(make_models, tmp_path, caplog):
    models = make_models("llama", tied=False)
    places = [(0, 2), (1, 3)]
    recipe = models.recipe("ramplus", parameters=STRONG)
    del recipe["models"]
    recipe["slices"] = [
        {
            "sources": [
                {"model": path, "layer_range": list(layers)}
                for path in (models.base_path, *models.agent_paths)
            ]
        }
        for layers in places
    ]
    sources = [layer for start, stop in places for layer in range(start, stop)]

    def stacked(weights: Weights) -> Weights:
        result = {n: t for n, t in weights.items() if layer_of(n) is None}
        for layer, source in enumerate(sources):
            for name, tensor in weights.items():
                if layer_of(name) == source:
                    result[name.replace(f"layers.{source}.", f"layers.{layer}.")] = tensor
        return result

    planned = plan(stacked(models.base), [stacked(a) for a in models.agents], STRONG)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(recipe, tmp_path, "--clone-tensors")
    assert logged_counts(caplog.text) == true_counts(planned)
    check(output, expect("ramplus", planned))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "merged")
    assert config.num_hidden_layers == 4


def test_modules_merge_their_own_agents_by_one_ratio_over_all(make_models, tmp_path, caplog):
    models = make_models("t5")
    first, second, third = models.agent_paths
    recipe = models.recipe("ramplus", parameters=STRONG)
    del recipe["models"]

    def of(*paths):
        return {"models": [{"model": path} for path in paths]}

    def sliced(*paths):
        sources = [{"model": path, "layer_range": [0, 2]} for path in paths]
        return {"slices": [{"sources": sources}], "parameters": {"lambda": 0.5}}

    recipe["modules"] = {
        "encoder": sliced(models.base_path, first, third),
        "decoder": of(first, second),
        "shared": of(second, third),
    }
    present = {
        "encoder": (0, 2),
        "decoder": (0, 1),
        "shared": (1, 2),
    }
    planned = {}
    for name, tensor in models.base.items():
        agents = [
            agent[name] if i in present[name.split(".")[0]] else tensor
            for i, agent in enumerate(models.agents)
        ]
        scale = {"lambda_": 0.5} if name.startswith("encoder") else {}
        planned[name] = Planned(tensor, agents, {**STRONG, **scale})
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(recipe, tmp_path)
    assert sorted(logged_counts(caplog.text)) == sorted(true_counts(planned))
    check(output, expect("ramplus", planned))


# Transformers adds the first to the tokenizer of any Qwen2.
TOKENS = ["<|endoftext|>", *(f"token{i}" for i in range(1, 48))]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Models:
    """A base of 48 tokens, an agent with the same in another order and one more, and an agent like
    the base.
    """
    directory = tmp_path_factory.mktemp("spoken")
    config, base = checkpoints.make_base("qwen2", tied=False)
    agents = [checkpoints.change(base, seed) for seed in (1, 2)]
    wider, _ = checkpoints.make_base("qwen2", tied=False, vocab_size=49)
    order = [0, *range(47, 0, -1)]
    stored = dict(agents[0])
    for name in VOCABULARY_WEIGHTS:
        stored[name] = torch.cat([agents[0][name][order], torch.full((1, 16), 0.5)])
    shuffled = [TOKENS[i] for i in order]
    return Models(
        config,
        base,
        agents,
        checkpoints.save(directory / "base", config, base, tokens=TOKENS),
        [
            checkpoints.save(directory / "wide", wider, stored, tokens=[*shuffled, "tool"]),
            checkpoints.save(directory / "same", config, agents[1], tokens=TOKENS),
        ],
    )


VOCABULARY_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"tokenizer_source": "base"}, 48),
        ({"tokenizer_source": "union"}, 49),
        ({"tokenizer": {"source": "base", "pad_to_multiple_of": 32}}, 64),
        ({"tokenizer": {"source": "union", "pad_to_multiple_of": 32}}, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_tokenizer_settings_align_vocabularies_before_counting(
    settings, rows, method, spoken, tmp_path, caplog
):
    parameters = {} if method == "ram" else STRONG
    union = "union" in str(settings)

    def aligned(weights: Weights) -> Weights:
        result = dict(weights)
        for name in VOCABULARY_WEIGHTS:
            tensor = weights[name]
            if union:
                # Only one model has the token: all take its embedding.
                tensor = torch.cat([tensor, torch.full((1, 16), 0.5)])
            padding = tensor.mean(0, keepdim=True).expand(rows - len(tensor), -1)
            result[name] = torch.cat([tensor, padding])
        return result

    planned = plan(aligned(spoken.base), [aligned(a) for a in spoken.agents], parameters)
    recipe = spoken.recipe(method, parameters=parameters, **settings)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(recipe, tmp_path)
    assert output["lm_head.weight"].shape == (rows, 16)
    if method == "ramplus":
        assert logged_counts(caplog.text) == true_counts(planned)
    check(output, expect(method, planned))


# --- The model-wide ratio: which tensors count, through every entry point -------------------------


def test_tied_weights_count_once(make_models, tmp_path, caplog):
    models = make_models("qwen2", tied=True)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(models.recipe("ramplus", parameters=STRONG), tmp_path)
    assert "lm_head.weight" not in output
    assert logged_counts(caplog.text) == true_counts(plan(models.base, models.agents))
    assert logged_totals(caplog.text) == {total_elements(output)}


def test_agent_with_tied_weights_lends_its_embedding_to_an_untied_head(make_models, tmp_path):
    config, base = checkpoints.make_base("qwen2", tied=False)
    base["lm_head.weight"] = base["model.embed_tokens.weight"].clone()
    agents = [checkpoints.change(base, seed) for seed in (1, 2)]
    models = save_models(tmp_path, config, base, agents)
    tied = dict(agents[1])
    del tied["lm_head.weight"]
    models.agent_paths[1] = checkpoints.save(tmp_path / "tied", config, tied)

    head = {"lm_head.weight": tied["model.embed_tokens.weight"]}
    planned = plan(base, [agents[0], {**tied, **head}], STRONG)
    output = merge(models.recipe("ramplus", parameters=STRONG), tmp_path)
    check(output, expect("ramplus", planned))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lacking", [(0, 1, 2, 3), (2,), (1, 3), (1, 2, 3)], ids=str)
def test_optional_tensor_counts_where_it_is_merged(lacking, method, make_models, tmp_path, caplog):
    models = make_models("glm4", tied=False)
    weights = [
        {n: t for n, t in w.items() if i not in lacking or not n.endswith("k_proj.bias")}
        for i, w in enumerate([models.base, *models.agents])
    ]
    models = save_models(tmp_path, models.config, weights[0], weights[1:])
    parameters = {} if method == "ram" else STRONG
    planned = plan(models.base, models.agents, parameters)
    assert any(name.endswith("k_proj.bias") for name in planned) == (0 not in lacking)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(models.recipe(method, parameters=parameters), tmp_path)
    if method == "ramplus":
        assert logged_counts(caplog.text) == true_counts(planned)
    check(output, expect(method, planned))


@pytest.mark.parametrize("method", METHODS)
def test_tensor_of_integers_is_copied_and_not_counted(method, make_models, tmp_path, caplog):
    models = make_models("llama")
    norm = {"model.norm.weight": torch.arange(16)}
    models = save_models(
        tmp_path,
        models.config,
        {**models.base, **norm},
        [{**agent, **norm} for agent in models.agents],
    )
    parameters = {} if method == "ram" else STRONG
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge(models.recipe(method, parameters=parameters), tmp_path)
    (name,) = norm
    assert torch.equal(output.pop(name), norm[name])
    del models.base[name]
    planned = plan(models.base, models.agents, parameters)
    if method == "ramplus":
        assert logged_counts(caplog.text) == true_counts(planned)
        assert logged_totals(caplog.text) == {total_elements(models.base)}
    check(output, expect(method, planned))


def state_dicts(models: Models) -> tuple[Weights, list[Weights]]:
    """Weights with what else a state dict holds: a counter, an empty tensor, a single number."""
    extra = {"steps": torch.tensor(7), "empty": torch.zeros(0, 4)}
    scale = {"scale": torch.tensor(0.5)}
    agents = [
        {**agent, **extra, "scale": scale["scale"] + 0.25 * i}
        for i, agent in enumerate(models.agents)
    ]
    return {**models.base, **extra, **scale}, agents


def floating(weights: Weights) -> Weights:
    return {n: t for n, t in weights.items() if t.is_floating_point()}


def check_state_dict(output: Weights, expected, base: Weights) -> None:
    output = dict(output)
    assert torch.equal(output.pop("steps"), base["steps"])
    check(output, expected)


def raw_recipe(
    directory: Path,
    base: Weights,
    agents,
    method: str,
    suffix=".safetensors",
    **parameters,
) -> dict:
    files = [
        checkpoints.save_state_dict(directory / f"{name}{suffix}", weights)
        for name, weights in [("base", base), *enumerate(agents)]
    ]
    return {
        "merge_method": method,
        "base_model": files[0],
        "models": [{"model": file} for file in files[1:]],
        "parameters": parameters,
    }


def merge_raw(recipe: Mapping, directory: Path, *options: str) -> Weights:
    file = write_recipe(recipe, directory)
    invoke(raw_pytorch.main, file, directory / "merged", *options)
    return checkpoints.read(directory / "merged")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_mergekit_pytorch_merges_state_dicts(suffix, method, make_models, tmp_path, caplog):
    base, agents = state_dicts(make_models())
    parameters = {} if method == "ram" else STRONG
    planned = plan(floating(base), agents, parameters)
    recipe = raw_recipe(tmp_path, base, agents, method, suffix, **parameters)
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        output = merge_raw(recipe, tmp_path)
    if method == "ramplus":
        assert logged_counts(caplog.text) == true_counts(planned)
    check_state_dict(output, expect(method, planned), base)


def test_mergekit_pytorch_command_merges_by_the_model_wide_ratio(make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ramplus", **STRONG)
    recipe |= {"dtype": "bfloat16", "out_dtype": "float32"}
    file = write_recipe(recipe, tmp_path)
    text = run_command(script("mergekit-pytorch"), file, tmp_path / "merged", "-v")
    planned = plan(floating(base), agents, STRONG)
    expected = expect("ramplus", planned, dtype=BF16, out_dtype=F32)
    check_state_dict(checkpoints.read(tmp_path / "merged"), expected, base)
    assert len(logged_counts(text)) == len(agents)


def test_mergekit_pytorch_takes_filters_weights_and_dtypes(make_models, tmp_path):
    base, agents = state_dicts(make_models())
    recipe = raw_recipe(tmp_path, base, agents, "ramplus", **STRONG)
    recipe["parameters"]["lambda"] = [{"filter": "mlp", "value": 0.5}, {"value": 1.0}]
    recipe["models"][1]["parameters"] = {"weight": 3.0}
    recipe["out_dtype"] = "bfloat16"

    def parameters_of(name):
        scale = 0.5 if "mlp" in name else 1.0
        return {**STRONG, "lambda_": scale, "weight": [1.0, 3.0, 1.0]}

    planned = plan(floating(base), agents, parameters_of)
    expected = expect("ramplus", planned, out_dtype=BF16)
    check_state_dict(merge_raw(recipe, tmp_path), expected, base)


@pytest.mark.parametrize("option", ["--tensor-union", "--tensor-intersection"])
def test_mergekit_pytorch_counts_what_it_merges_of_differing_models(option, make_models, tmp_path):
    base, agents = state_dicts(make_models())
    missing = "model.embed_tokens.weight"
    del agents[1][missing]
    recipe = raw_recipe(tmp_path, base, agents, "ramplus", **STRONG)
    merged = floating(base)
    if option == "--tensor-intersection":
        del merged[missing]
    output = merge_raw(recipe, tmp_path, option)
    planned = plan(merged, agents, STRONG)
    check_state_dict(output, expect("ramplus", planned), base)


MULTI = """\
name: halfway
merge_method: ramplus
base_model: {base}
models:
  - model: {agents[0]}
  - model: {agents[1]}
parameters:
  r: 1.0
  alpha: 10.0
---
merge_method: ramplus
base_model: {base}
models:
  - model: halfway
  - model: {agents[2]}
parameters:
  r: 1.0
  alpha: 10.0
"""


@pytest.mark.parametrize("as_command", [False, True], ids=["in process", "command"])
def test_mergekit_multi_merges_every_step_by_its_own_ratio(as_command, make_models, tmp_path):
    models = make_models("llama")
    file = tmp_path / "multi.yml"
    file.write_text(MULTI.format(base=models.base_path, agents=models.agent_paths))
    arguments = file, "-I", tmp_path / "steps", "--out-path", tmp_path / "merged"
    if as_command:
        run_command(script("mergekit-multi"), *arguments)
    else:
        invoke(multimerge.main, *arguments)
    halfway = checkpoints.read(tmp_path / "steps" / "halfway")
    check(halfway, expect("ramplus", plan(models.base, models.agents[:2], STRONG)))
    planned = plan(models.base, [halfway, models.agents[2]], STRONG)
    check(checkpoints.read(tmp_path / "merged"), expect("ramplus", planned))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("out_dtype", [None, BF16])
def test_merge_state_dicts_takes_the_ratio_over_all_its_groups(out_dtype, method, make_models):
    base, agents = state_dicts(make_models())
    parameters = {} if method == "ram" else STRONG
    output = merge_state_dicts(
        {"base": base, **dict(enumerate(agents))},
        method,
        base="base",
        parameters=parameters,
        out_dtype=out_dtype,
    )
    planned = plan(floating(base), agents, parameters)
    check_state_dict(output, expect(method, planned, out_dtype=out_dtype), base)


def test_merge_state_dicts_takes_values_by_agent_and_by_group(make_models):
    base, agents = state_dicts(make_models())
    names = list(base)
    scales = [0.5 if "mlp" in name else 1.0 for name in names]
    output = merge_state_dicts(
        [base, *agents],
        "ramplus",
        base=0,
        parameters={
            **STRONG,
            "weight": {1: 1.0, 2: 3.0, 3: 0.5},
            "lambda": PerGroupValues(scales),
        },
    )
    settings = {
        name: {**STRONG, "weight": [1.0, 3.0, 0.5], "lambda_": scale}
        for name, scale in zip(names, scales, strict=True)
    }
    planned = plan(floating(base), agents, settings.__getitem__)
    check_state_dict(output, expect("ramplus", planned), base)


@pytest.mark.parametrize("method", METHODS)
def test_merge_tensors_takes_the_ratio_of_its_only_group(method, make_models):
    models = make_models()
    parameters = {} if method == "ram" else STRONG
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = [weights[name] for weights in (models.agents[0], models.base, *models.agents[1:])]
    before = [tensor.clone() for tensor in tensors]
    output = merge_tensors(tensors, method, base_index=1, parameters=parameters)
    planned = {name: plan(models.base, models.agents, parameters)[name]}
    check({name: output}, expect(method, planned))
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("method", METHODS)
def test_plan_in_memory_gives_what_mergekit_yaml_gives(method, make_models, tmp_path):
    models = make_models("mistral")
    parameters = {} if method == "ram" else STRONG
    recipe = models.recipe(method, parameters=parameters, out_dtype="bfloat16")
    output = merge_in_memory(recipe)
    planned = plan(models.base, models.agents, parameters)
    check(output, expect(method, planned, out_dtype=BF16))
    saved = merge(recipe, tmp_path)
    assert all(torch.equal(saved[name], output[name]) for name in saved)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings", [{}, {"layer_granularity": 1, "filters": ["mlp"]}, {"smooth": True}]
)
def test_evolve_searches_the_weights_of_agents(method, settings, make_models):
    genome_module = pytest.importorskip("mergekit.evo.genome")
    models = make_models("llama", tied=False)
    genome = genome_module.ModelGenome(
        genome_module.ModelGenomeDefinition(
            models=models.agent_paths,
            merge_method=method,
            base_model=models.base_path,
            **settings,
        )
    )
    genotype = genome.initial_genotype(random=False) * 1.5
    assert genotype.shape[-1] == 1
    config = genome.genotype_merge_config(genotype)
    output = merge_in_memory(config.model_dump(mode="json", exclude_none=True))
    parameters = {"weight": [0.5] * 3, "normalize": False}
    planned = plan(models.base, models.agents, parameters)
    check(output, expect(method, planned, dtype=BF16))


# --- Counts belong to one merge -------------------------------------------------------------------


def recipes_of_pairs(models: Models) -> list[tuple[dict, Plan]]:
    """Merges of the same base and overlapping choices of agents, whose ratios all differ."""
    chosen = [(0, 1), (1, 2), (0, 2), (0, 1, 2), (2, 1, 0)]
    found = []
    for agents in chosen:
        recipe = models.recipe("ramplus", parameters=STRONG)
        recipe["models"] = [{"model": models.agent_paths[i]} for i in agents]
        planned = plan(models.base, [models.agents[i] for i in agents], STRONG)
        found.append((recipe, planned))
    return found


def test_merges_one_after_another_share_no_counts(make_models, tmp_path):
    for i, (recipe, planned) in enumerate(recipes_of_pairs(make_models())):
        directory = tmp_path / str(i)
        directory.mkdir()
        check(merge(recipe, directory), expect("ramplus", planned))


def test_planning_two_merges_before_running_either_shares_no_counts(make_models):
    work = recipes_of_pairs(make_models())
    tasks = [plan_recipe(recipe).plan_in_memory() for recipe, _ in work]
    for planned_tasks, (_, planned) in reversed(list(zip(tasks, work, strict=True))):
        results = Executor(planned_tasks).run(quiet=True)
        output = {task.weight_info.name: tensor for task, tensor in results}
        check(output, expect("ramplus", planned))


def test_plan_can_be_run_again(make_models):
    (recipe, planned), *_ = recipes_of_pairs(make_models())
    tasks = plan_recipe(recipe).plan_in_memory()
    expected = expect("ramplus", planned)
    for _ in range(2):
        results = Executor(tasks).run(quiet=True)
        check({task.weight_info.name: tensor for task, tensor in results}, expected)


def test_merges_in_threads_share_no_counts(make_models):
    work = recipes_of_pairs(make_models()) * 3
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(merge_in_memory, [recipe for recipe, _ in work]))
    for output, (_, planned) in zip(outputs, work, strict=True):
        check(output, expect("ramplus", planned))


def test_merge_state_dicts_in_threads_share_no_counts(make_models):
    work = recipes_of_pairs(make_models())
    groups = [
        [
            {name: planned[name].base for name in planned},
            *(
                {name: planned[name].agents[i] for name in planned}
                for i in range(len(recipe["models"]))
            ),
        ]
        for recipe, planned in work
    ]

    def run(models):
        return merge_state_dicts(models, "ramplus", base=0, parameters=STRONG)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        outputs = list(pool.map(run, groups))
    for output, (_, planned) in zip(outputs, work, strict=True):
        check(output, expect("ramplus", planned))


# --- Degenerate agents ----------------------------------------------------------------------------


def degenerate(name: str, base: Weights) -> list[Weights]:
    one, two = checkpoints.change(base, 1), checkpoints.change(base, 2)
    return {
        "an agent equal to the base": lambda: [base, one, two],
        "two identical agents": lambda: [one, one, two],
        "only identical agents": lambda: [one, one],
        "one agent": lambda: [one],
        "all equal to the base": lambda: [base, base],
        "only an agent equal to the base": lambda: [base],
        "an agent without unique changes": lambda: [
            # It changed, otherwise, some of what the first changed.
            {n: torch.where(one[n] != base[n], two[n], base[n]) for n in base},
            one,
        ],
        "agents without shared changes": lambda: [
            {n: torch.where(one[n] == base[n], two[n], base[n]) for n in base},
            one,
        ],
    }[name]()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case",
    [
        "an agent equal to the base",
        "two identical agents",
        "only identical agents",
        "one agent",
        "all equal to the base",
        "only an agent equal to the base",
        "an agent without unique changes",
        "agents without shared changes",
    ],
)
def test_degenerate_agents_have_a_defined_result(case, method, make_models, tmp_path, caplog):
    models = make_models()
    agents = degenerate(case, models.base)
    models = save_models(tmp_path, models.config, models.base, agents)
    parameters = {} if method == "ram" else STRONG
    recipe = models.recipe(method, parameters=parameters)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        output = merge(recipe, tmp_path)
    assert all(tensor.isfinite().all() for tensor in output.values())
    check(output, expect(method, plan(models.base, agents, parameters)))
    ours = ("mergekit_ram", "torch", "numpy")
    assert not [w for w in warned if any(f"{os.sep}{part}{os.sep}" in w.filename for part in ours)]
    # At most one an agent, however many tensors there are.
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum(r.name.startswith("mergekit_ram") for r in logged) <= len(agents)


# --- Many GPUs ------------------------------------------------------------------------------------


@pytest.fixture
def two_accelerators(monkeypatch):
    """Let mergekit's multi-GPU executor take the CPU for two accelerators."""
    module = mergekit.multigpu_executor

    def work(self, task_list, cached_values, device, quiet):
        executor = Executor(task_list, cached_values=cached_values)
        for handle, result in executor._run(quiet=quiet):
            if handle not in self.targets | self.trailing_dependencies:
                result = None
            self.task_completion_queue.put((handle._index, result))

    monkeypatch.setattr(module, "get_torch_accelerator_count", lambda *_: 2)
    monkeypatch.setattr(module, "get_torch_accelerator_type", lambda *_: "cuda")
    monkeypatch.setattr(module.MultiGPUExecutor, "_device_worker", work)


def islands(recipe: Mapping, out: Path, caplog) -> int:
    caplog.clear()
    targets = plan_recipe(recipe).plan_to_disk(str(out))
    with caplog.at_level(logging.INFO, "mergekit.multigpu_executor"):
        executor = mergekit.multigpu_executor.MultiGPUExecutor(targets)
    assert len(executor.gpu_assignments) == 2
    (found,) = re.findall(r"Found (\d+) islands", caplog.text)
    return int(found)


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_stays_an_island_of_its_own(
    method, make_models, tmp_path, caplog, two_accelerators
):
    models = make_models("llama", tied=False)
    agents = [{"weight": 1.0}] * 3
    theirs = islands(models.recipe("task_arithmetic", agents=agents), tmp_path, caplog)
    assert theirs == len(models.base)
    assert islands(models.recipe(method), tmp_path, caplog) == theirs


def test_multi_gpu_executor_merges_by_the_model_wide_ratio(make_models, tmp_path, two_accelerators):
    models = make_models("llama", tied=False)
    recipe = models.recipe("ramplus", parameters=STRONG)
    output = merge(recipe, tmp_path, "--multi-gpu")
    check(output, expect("ramplus", plan(models.base, models.agents, STRONG)))
