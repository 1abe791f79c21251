from __future__ import annotations

import pytest

from mergekit_ram.report.findings import Comparison
from support.recipes import Models
from support.tools import compare


@pytest.fixture(scope="session")
def models(make_models) -> Models:
    return make_models()


@pytest.fixture(scope="session")
def compared(models, tmp_path_factory) -> Comparison:
    directory = tmp_path_factory.mktemp("compared")
    return compare(models.recipe("ramplus", parameters={"r": 1.0}), directory)
