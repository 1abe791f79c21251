"""``ram_report.json`` read back."""

from __future__ import annotations

import json
from pathlib import Path

from mergekit_ram.report.record import Report
from support.expected import STRONG

FILE = "ram_report.json"


def read_report(directory: Path) -> Report:
    """The report beside a model, which is all of the file and nothing else."""
    text = (directory / FILE).read_text()
    report = Report.model_validate_json(text)
    assert report.to_json() + "\n" == text
    assert Report.model_validate(json.loads(text)) == report
    assert not list(directory.glob("*.partial"))
    return report


def strong(method: str) -> dict:
    return {} if method == "ram" else STRONG
