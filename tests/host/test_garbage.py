"""The garbage collector spares the imports of a command, and of nothing else."""

from __future__ import annotations

import gc
import sys

import pytest
from click.testing import CliRunner
from mergekit.scripts import run_yaml

from mergekit_ram.host import garbage
from support.commands import merge
from support.recipes import write_ramplus


def state():
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()


@pytest.mark.parametrize("outcome", ["ends", "fails"])
def test_garbage_collector_is_as_it_was_after_a_merge(outcome, paths, tmp_path):
    before = state()
    agents = paths[1:] if outcome == "ends" else [str(tmp_path / "nowhere")]
    recipe = write_ramplus(tmp_path, paths[0], *agents)
    result = CliRunner().invoke(run_yaml.main, [recipe, str(tmp_path / "merged")])
    assert (result.exit_code == 0) == (outcome == "ends"), result.output
    assert state() == before


@pytest.mark.parametrize(
    ("command", "frozen"),
    [
        ("/usr/bin/mergekit-yaml", True),
        ("mergekit-ram.exe", True),
        ("mergekit-evolve", False),
        ("notebook", False),
        ("", False),
    ],
)
def test_only_a_command_that_ends_with_the_merge_spares_its_imports(command, frozen, monkeypatch):
    monkeypatch.setattr(sys, "argv", [command])
    before = gc.get_freeze_count()
    assert before == 0
    try:
        garbage.spare_imports()
        garbage.spare_imports()
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.unfreeze()


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
