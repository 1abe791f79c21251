"""How mergekit is extended, by one module with a function ``extend`` for each of its own.

With ``host.compatibility`` this is the only place that touches what mergekit keeps private. Every
touch first checks what it relies on and, where that has changed, says which versions of mergekit
work. ``_autoload`` imports these modules as mergekit's own are imported.
"""

# First of all, so that what extends it is complete before anything here needs it.
import mergekit.merge_methods  # noqa: F401
