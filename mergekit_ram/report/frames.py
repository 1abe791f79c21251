"""Tables for pandas, which is an optional extra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mergekit_ram.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas


def frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """A table with a column for each key.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas  # an optional extra
    except ImportError:
        raise MissingExtraError("to_frame", "pandas", "frames") from None
    return pandas.DataFrame(list(rows))
