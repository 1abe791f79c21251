"""Fixtures that tests of several packages take.

What imports mergekit is imported inside them: tests of ``method`` need none, and it takes seconds.
"""

from __future__ import annotations

import functools
import sys

import pytest


@pytest.fixture(autouse=True)
def forget_loaders():
    """Clear the caches in which mergekit keeps every checkpoint that it has opened.

    Relative paths, and files changed meanwhile, mean other weights in the next test.
    """
    yield
    for module, cache in (
        ("mergekit.io.tasks", "LoaderCache"),
        ("mergekit.scripts.merge_raw_pytorch", "SimpleLoaderCache"),
    ):
        if module in sys.modules:
            getattr(sys.modules[module], cache)().loaders.clear()


@pytest.fixture(scope="session")
def make_models(tmp_path_factory):
    """Makes ``support.recipes.Models`` of an architecture and settings, each once: to be read."""
    from support.recipes import new_models

    @functools.cache
    def make(architecture="qwen2", **settings):
        return new_models(tmp_path_factory.mktemp("models") / "m", architecture, **settings)

    return make


@pytest.fixture(scope="session")
def spoken(tmp_path_factory):
    """Models with tokenizers, see ``support.recipes.spoken_models``."""
    from support.recipes import spoken_models

    return spoken_models(tmp_path_factory.mktemp("spoken"))


@pytest.fixture
def no_weight_is_read(monkeypatch):
    from mergekit.io.tasks import LoadTensor
    from mergekit.scripts.merge_raw_pytorch import SimpleLoadTensor

    def refuse(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(LoadTensor, "execute", refuse)
    monkeypatch.setattr(SimpleLoadTensor, "execute", refuse)


@pytest.fixture(scope="session")
def paths(tmp_path_factory) -> list[str]:
    """Directories of a base and two agents."""
    from support.recipes import save_agents

    return save_agents(tmp_path_factory.mktemp("paths"), 2, tied=False)
