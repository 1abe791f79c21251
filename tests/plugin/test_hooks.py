"""Merges are ours whatever other plugins do and whatever was imported first."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from support.recipes import write_ramplus

PLUGIN = """
    import functools, mergekit.merge
    original = mergekit.merge.run_merge
    @functools.wraps(original)
    def other(*args, **kwargs):
        print("the other plugin")
        return original(*args, **kwargs)
    mergekit.merge.run_merge = other
"""
CARELESS = PLUGIN.replace("@functools.wraps(original)", "")
ORDERS = {
    "a careless plugin before ours": ("DISABLED", CARELESS, "import mergekit_ram"),
    "a careless plugin after ours": (
        "import mergekit_ram",
        CARELESS,
        "mergekit_ram._autoload.install()",
    ),
    "another plugin before ours": ("DISABLED", PLUGIN, "import mergekit_ram"),
    "another plugin after ours": ("import mergekit_ram", PLUGIN),
    "a command imported before ours": (
        "DISABLED",
        "from mergekit.scripts.run_yaml import main",
        "import mergekit_ram",
    ),
    "a function imported before ours": (
        "DISABLED",
        "from mergekit.merge import run_merge",
        "import mergekit_ram",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_merges_are_ours_whatever_was_imported_first(order, paths, tmp_path):
    first, *steps = ORDERS[order]
    if first == "DISABLED":
        start = "import os; os.environ['MERGEKIT_RAM_DISABLE'] = '1'"
    else:
        steps, start = [first, *steps], ""
    recipe, out = write_ramplus(tmp_path, *paths), str(tmp_path / "merged")
    run = f"""
        import sys
        sys.argv = ["mergekit-yaml", {recipe!r}, {out!r}]
        if "run_merge" in globals():
            import yaml
            from mergekit.config import MergeConfiguration
            from mergekit.options import MergeOptions
            config = MergeConfiguration.model_validate(yaml.safe_load(open({recipe!r})))
            run_merge(config, {out!r}, MergeOptions())
        else:
            from mergekit.scripts.run_yaml import main
            main()
    """
    program = "\n".join(textwrap.dedent(part) for part in (start, *steps, run))
    environment = {"MERGEKIT_RAM_DISABLE": "1"} if first == "DISABLED" else {}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "merged" / "ram_report.json").exists()
    assert result.stdout.count("the other plugin") == ("plugin" in order.split("ours")[0])


def test_reloaded_module_is_extended_again():
    program = """
        import importlib, mergekit_ram, mergekit.merge
        importlib.reload(mergekit.merge)
        print(mergekit.merge.run_merge._extended_by_mergekit_ram)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert result.stdout.strip() == "True", result.stderr
