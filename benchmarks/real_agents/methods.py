"""Every merge method, its defaults and what of it is tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Setting(NamedTuple):
    """Parameters of a method, and lambda."""

    parameters: tuple[tuple[str, float], ...] = ()
    scale: float = 1.0

    @property
    def name(self) -> str:
        return ",".join(
            f"{key}={value:g}" for key, value in (*self.parameters, ("lambda", self.scale))
        )


def grid(scales: Sequence[float], *structures: Mapping[str, float]) -> list[Setting]:
    return [Setting(tuple(each.items()), scale) for each in structures for scale in scales]


# Six settings for every method. Those that average and those that add want different lambdas; where
# a method has a parameter besides, it gets two values of it and three lambdas.
AVERAGING, ADDING = (1.0, 1.5, 2.0), (0.5, 0.75, 1.0)
AVERAGING_ALONE, ADDING_ALONE = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0), (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
RESCALING = ({"r": 0.1, "alpha": 0.2}, {"r": 1.0, "alpha": 1.0})
METHODS: dict[str, list[Setting]] = {
    "ram": grid(AVERAGING_ALONE, {}),
    "task_arithmetic": grid(ADDING_ALONE, {}),
    "linear": grid(AVERAGING_ALONE, {}),
    "ties": grid(AVERAGING, {"density": 1.0}, {"density": 0.2}),
    "ramplus": grid(AVERAGING, *RESCALING),
    "sce": grid(AVERAGING, {"select_topk": 1.0}, {"select_topk": 0.2}),
    "dare_ties": grid(ADDING, {"density": 0.8}, {"density": 0.5}),
    "ramplus_tl": grid(AVERAGING, *RESCALING),
    "della": grid(AVERAGING, {"density": 0.8}, {"density": 0.5}),
    "breadcrumbs_ties": grid(ADDING, {"density": 0.9}, {"density": 0.5}),
    "dare_linear": grid(ADDING, {"density": 0.8}, {"density": 0.5}),
}
DEFAULT = Setting()
