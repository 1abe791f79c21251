"""Hooks the plugin into mergekit, which has no plugin loading of its own.

``mergekit_ram.pth`` imports the package whenever Python starts, unless ``MERGEKIT_RAM_DISABLE`` is
set to something other than 0. All that happens then is that a finder waits on ``sys.meta_path`` for
the modules of mergekit that the plugin extends; only when one of them is imported is the module of
``mergekit_ram.plugin`` that extends it, with torch and the rest, imported too. Standard library
only, and as little of it as possible: this runs in every Python process.
"""

import sys

SUPPORTED = ">=0.1.5,<0.2"

# Module of mergekit → module of mergekit_ram.plugin that extends it.
_HOOKS = {
    "mergekit.merge_methods": "registry",
    "mergekit.plan": "planner",
    "mergekit.merge": "merging",
    "mergekit.scripts.multimerge": "multimerge",
    "mergekit.scripts.merge_raw_pytorch": "state_dicts",
    "mergekit.evo.genome": "genome",
}

# Those that are being imported at this moment.
_loading = set()

# Those that could not be extended. With one of them none is: a part of the plugin would be worse
# than nothing of it.
_refused = set()


class _Finder:
    """Finds a hooked module as the other finders do, and has it extended once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name not in _HOOKS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Loads a module by its own loader, which the module shows as its loader, then extends the
    module.
    """

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        _loading.add(module.__name__)
        # A reloaded module is to be extended again.
        vars(module).pop("_extended_by_mergekit_ram", None)
        try:
            self._loader.exec_module(module)
        finally:
            _loading.discard(module.__name__)
        if _refused:
            return
        try:
            _extend(module)
        except Exception as error:
            # mergekit works on without the plugin, until a recipe asks for it.
            _refuse_merges(module, error)


def install() -> None:
    """Extend mergekit as it is imported, and what is imported of it already.
    Any number of times.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in _HOOKS:
        module = sys.modules.get(name)
        if module is not None and name not in _loading:
            _extend(module)


def _extend(module):
    import importlib

    plugin = f"mergekit_ram.plugin.{_HOOKS[module.__name__]}"
    importlib.import_module(plugin).extend(module)


def _refuse_merges(module, error):
    """Have every recipe that names a method of the plugin fail with the reason, never run something
    else.
    """
    import warnings

    _refused.add(module.__name__)
    message = f"mergekit-ram cannot extend {module.__name__}: {error}"
    if SUPPORTED not in message:
        message += f". It works with mergekit {SUPPORTED}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    methods = sys.modules.get("mergekit.merge_methods")
    get = getattr(methods, "get", None)
    if get is None or getattr(get, "_refused_by_mergekit_ram", False):
        return

    def refusing_get(name):
        if name in ("ram", "ramplus", "ramplus_tl"):
            import click

            # mergekit's commands show its message, not a traceback.
            raise click.ClickException(message)
        return get(name)

    refusing_get._refused_by_mergekit_ram = True
    methods.get = refusing_get
