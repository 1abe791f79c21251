"""What a written model still lacks when mergekit is done with it."""

from __future__ import annotations

import json
import os

from mergekit_ram.host.checkpoint.quantization import CONFIG_KEYS
from mergekit_ram.report.merge_report import FILE_NAME, Report


def drop_quantization(directory: str) -> None:
    """Leave out of a written config how weights were quantized once: what was merged is plain."""
    path = os.path.join(directory, "config.json")
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    plain = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    if plain != config:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(plain, indent=2, sort_keys=True) + "\n")


def add_card_section(directory: str) -> None:
    """Describe the agents in a written model's card, if it has both a card and a report."""
    card = os.path.join(directory, "README.md")
    report = os.path.join(directory, FILE_NAME)
    if os.path.exists(card) and os.path.exists(report):
        with open(report, encoding="utf-8") as file:
            section = Report.model_validate_json(file.read()).to_markdown()
        with open(card, "a", encoding="utf-8") as file:
            file.write("\n" + section)
