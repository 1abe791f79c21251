"""``ram_report.json`` as a file: whole or not at all, with a schema."""

from __future__ import annotations

import json
import os

import pytest
from pydantic import ValidationError

from mergekit_ram.report.record import Report
from support.commands import merge
from support.reports import FILE


def a_report() -> Report:
    return Report(
        versions={},
        method="ram",
        base_model="base",
        recipe={},
        total=0,
        agents=[],
        pairwise_shared=[],
        pairwise_conflicts=[],
        sign_conflicts=0,
        layers=[],
        module_types=[],
    )


def test_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    a_report().write(str(tmp_path))
    before = (tmp_path / FILE).read_text()

    def fail(*_):
        raise OSError(28, "No space left on device")

    changed = a_report().model_copy(update={"method": "ramplus"})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            changed.write(str(tmp_path))
    assert (tmp_path / FILE).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    changed.write(str(tmp_path))
    assert Report.model_validate_json((tmp_path / FILE).read_text()) == changed


def test_schema_has_a_version_and_refuses_other_files():
    assert a_report().schema_version == 1
    for text in ("{}", '{"schema_version": 1}', "[]"):
        with pytest.raises(ValidationError):
            Report.model_validate_json(text)


def test_json_keys_are_those_that_are_documented(make_models, tmp_path):
    merge(make_models().recipe("ramplus"), tmp_path)
    content = json.loads((tmp_path / "merged" / FILE).read_text())
    assert content["agents"][0].keys() == {
        "model",
        "total",
        "changed",
        "unique",
        "shared",
        "overlap_histogram",
        "rho",
        "lambda",
        "lambda_range",
    }
    for key in (
        "schema_version",
        "versions",
        "method",
        "recipe",
        "pairwise_shared",
        "sign_conflicts",
        "layers",
    ):
        assert key in content
