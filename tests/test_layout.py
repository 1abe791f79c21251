"""The layout of the code: imports go down only, parts are short, any may be imported first."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

FILES = [
    file
    for directory in ("mergekit_ram", "tests", "benchmarks", "example_yamls")
    for file in sorted((ROOT / directory).rglob("*.py"))
]
# In lines, docstrings among them. What is longer says in its docstring why it is better whole.
FUNCTION, CLASS, FILE, FILE_OF_TESTS = 60, 150, 350, 600
EXCUSE = "better whole"


def test_imports_go_down_only():
    pytest.importorskip("importlinter", reason="needs import-linter")
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def too_long(file: Path) -> Iterator[str]:
    text = file.read_text()
    module = ast.parse(text)
    if EXCUSE in " ".join((ast.get_docstring(module) or "").split()):
        return
    name = file.relative_to(ROOT)
    lines = len(text.splitlines())
    if lines > (FILE_OF_TESTS if "tests" in name.parts else FILE):
        yield f"{name}: {lines} lines"
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            lines = node.end_lineno - node.lineno + 1
            limit = CLASS if isinstance(node, ast.ClassDef) else FUNCTION
            excused = EXCUSE in " ".join((ast.get_docstring(node) or "").split())
            if lines > limit and not excused:
                yield f"{name}, {node.name}: {lines} lines"


def test_functions_classes_and_files_are_short():
    found = [part for file in FILES for part in too_long(file)]
    assert not found, "\n".join(found)


def test_no_test_file_is_imported_by_another():
    imported = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
        if name.split(".")[-1].startswith(("test_", "conftest"))
    ]
    assert not imported


# --- Whichever module is imported first -----------------------------------------------------------

# One of every package, and those of mergekit that are extended. `plugin` alone has its order from
# `_autoload`.
FIRST = (
    "mergekit_ram.method",
    "mergekit_ram.report.record",
    "mergekit_ram.host.methods",
    "mergekit_ram.host.output",
    "mergekit_ram.check.recipes",
    "mergekit_ram.cluster.driver",
    "mergekit_ram.tools.comparison",
    "mergekit_ram.cli",
    "mergekit.plan",
    "mergekit.scripts.multimerge",
)
EXTENDS = """
import importlib, os, sys, warnings
import torch, transformers

def is_extended_after(module):
    warnings.simplefilter("error", RuntimeWarning)
    importlib.import_module(module)
    import mergekit.merge, mergekit.merge_methods, mergekit.plan
    from mergekit.scripts import merge_raw_pytorch, multimerge
    owner = type(mergekit.merge_methods.get("ram")).__module__
    assert owner == "mergekit_ram.plugin.registry", owner
    assert hasattr(mergekit.plan.MergePlanner, "mergekit_ram_record")
    for function in (
        mergekit.merge.run_merge,
        multimerge.run_merge,
        multimerge.make_tasks,
        merge_raw_pytorch.plan_flat_merge,
    ):
        assert function._extended_by_mergekit_ram, function

import mergekit_ram
running = {}
failed = []

def wait():
    child, status = os.wait()
    module = running.pop(child)
    if status:
        failed.append(module)

for module in sys.argv[1:]:
    if len(running) == 2:
        wait()
    child = os.fork()
    if not child:
        try:
            is_extended_after(module)
        except BaseException as error:
            print(module, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    running[child] = module
while running:
    wait()
sys.exit(1 if failed else 0)
"""


@pytest.mark.slow
def test_mergekit_is_extended_whichever_module_is_imported_first():
    done = subprocess.run(
        [sys.executable, "-c", EXTENDS, *FIRST],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
