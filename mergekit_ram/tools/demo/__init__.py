"""The demo: three agents that come with this package, merged and scored on what each learned.

``run`` is the demo itself and ``table`` prints what it measured. ``families`` holds the tasks,
``evaluate`` scores checkpoints on them, ``merging`` writes recipes and runs them; benchmarks/agents
trains such agents and compares the methods by the same three modules. ``checkpoints`` holds a base
and its agents, see the README there.
"""
