"""How the plugin reaches an unmodified mergekit, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support import ROOT, checkpoints

PACKAGE = ROOT / "mergekit_ram"
# What start-up must leave alone; each takes from a tenth of a second to seconds.
HEAVY = ("torch", "mergekit", "pydantic", "click", "safetensors", "transformers")
OWNER = "print(type(merge_methods.get('ram')).__module__)"
OURS = "mergekit_ram.plugin.registry"


def run(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(code: str, *options: str, **environment: str) -> list[str]:
    """Lines that the code prints in a new interpreter, which must neither fail nor complain."""
    done = run(code, *options, **environment)
    assert done.returncode == 0, done.stderr
    assert "mergekit_ram" not in done.stderr, done.stderr
    return done.stdout.split()


def test_startup_installs_the_hook_and_imports_nothing_heavy():
    loaded = output("import sys; print(*sys.modules)")
    assert "mergekit_ram._autoload" in loaded
    assert not [name for name in HEAVY if name in loaded]


def test_environment_variable_gives_mergekits_own_methods_back():
    code = f"""
        from mergekit import merge_methods
        {OWNER}
        print("ramplus" in merge_methods.registry._METHODS)
    """
    assert output(code) == [OURS, "True"]
    assert output(code, MERGEKIT_RAM_DISABLE="0") == [OURS, "True"]
    owner, *others = output(code, MERGEKIT_RAM_DISABLE="1")
    assert owner.startswith("mergekit.") and others == ["False"]


@pytest.mark.parametrize(
    "imports",
    [
        "import mergekit_ram; from mergekit import merge_methods",
        "from mergekit import merge_methods; import mergekit_ram, importlib; "
        "importlib.reload(mergekit_ram)",
        "import mergekit_ram.host.methods; from mergekit import merge_methods",
        "import mergekit_ram.plugin.planner; from mergekit import merge_methods",
    ],
)
def test_import_registers_in_any_order_and_any_number_of_times(imports):
    code = f"{imports}\n{OWNER}\nfrom mergekit.plan import MergePlanner\n"
    code += "print(hasattr(MergePlanner, 'mergekit_ram_record'))"
    # Without the .pth file, which would bring the hook by itself.
    assert output(code, MERGEKIT_RAM_DISABLE="1") == [OURS, "True"]


def test_threads_and_child_processes_have_the_methods():
    code = """
        import multiprocessing, threading
        from concurrent.futures import ProcessPoolExecutor

        def owner():
            from mergekit import merge_methods
            return type(merge_methods.get("ramplus")).__module__

        if __name__ == "__main__":
            owners = []
            threads = [threading.Thread(target=lambda: owners.append(owner())) for _ in range(4)]
            [t.start() for t in threads], [t.join() for t in threads]
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                owners.append(pool.submit(owner).result())
            print(*owners)
    """
    assert output(code) == [OURS] * 5


# --- mergekits that cannot be extended ------------------------------------------------------------


def with_package(directory: Path, files: dict[str, str]) -> str:
    """Code that starts an interpreter's imports over with nothing installed but the plugin and
    these files.
    """
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (directory / "mergekit_ram").symlink_to(PACKAGE)
    (directory / "mergekit_ram.pth").write_text((PACKAGE.parent / "mergekit_ram.pth").read_text())
    return f"import site, sys; site.addsitedir({str(directory)!r})\n"


def test_startup_survives_without_mergekit(tmp_path):
    start = with_package(tmp_path, {})
    done = run(
        start
        + "print('mergekit_ram._autoload' in sys.modules)\n"
        + "try:\n    import mergekit.merge_methods\nexcept ModuleNotFoundError as e:\n    print(e)",
        *("-I", "-S"),
    )
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.splitlines() == ["True", "No module named 'mergekit'"]


def test_half_installed_mergekit_fails_by_its_own_error(tmp_path):
    start = with_package(
        tmp_path,
        {
            "mergekit/__init__.py": "",
            "mergekit/merge_methods/__init__.py": "import gone_missing",
        },
    )
    done = run(start + "import mergekit.merge_methods", "-I", "-S")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'gone_missing'"


def test_other_mergekit_works_on_and_refuses_our_methods_by_name(tmp_path):
    start = with_package(
        tmp_path,
        {
            "mergekit/__init__.py": "",
            "mergekit/merge_methods/__init__.py": "def get(name): return f'their {name}'",
            # Stands for click, which every mergekit brings.
            "click.py": "class ClickException(Exception): pass",
        },
    )
    code = """
from mergekit import merge_methods
print(merge_methods.get("ties"))
for name in ("ram", "ramplus", "ramplus_tl"):
    try:
        print(merge_methods.get(name))
    except Exception as error:
        print(error)
"""
    done = run(start + code, "-I", "-S")
    theirs, *refusals = done.stdout.splitlines()
    assert theirs == "their ties"
    assert len(refusals) == 3
    for refusal in refusals:
        assert ">=0.1.5,<0.2" in refusal
    assert done.stderr.count("RuntimeWarning") == 1


def test_merge_in_an_unsupported_version_ends_with_a_message(tmp_path):
    config, base = checkpoints.make_base("qwen2")
    path = checkpoints.save(tmp_path / "base", config, base)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"{{merge_method: ramplus, base_model: {path}, models: [{{model: {path}}}]}}")
    out = tmp_path / "out"
    done = run(f"""
        import importlib.metadata, sys
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.2.0" if name == "mergekit" else real(name)
        from mergekit import merge_methods
        from mergekit.plan import MergePlanner
        from mergekit.scripts.run_yaml import main
        sys.argv[1:] = {[str(recipe), str(out), "--no-write-model-card"]}
        main()
    """)
    assert done.returncode == 1
    assert not out.exists()
    told = done.stderr.splitlines()[-1]
    assert ">=0.1.5,<0.2" in told and "0.2.0" in told
