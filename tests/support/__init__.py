"""What tests share: the oracle, small checkpoints, recipes, commands."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
