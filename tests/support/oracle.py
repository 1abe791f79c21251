"""Float64 reference of the rule, its parameters and the authors' five modes, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add

import numpy as np

Array = np.ndarray
StateDict = Mapping[str, Array]

# Bits of the significand and exponent of the smallest normal number.
_FORMATS = {
    "bfloat16": (8, -126),
    "float16": (11, -14),
    "float32": (24, -126),
    "float64": (53, -1022),
}

# How near, relatively, to a tie float32 arithmetic may decide otherwise.
_CONTESTED = 2.0**-20


@dataclass(frozen=True, eq=False)
class Overlap:
    """Integer arrays: ``[agents]``, ``[agents, agents]``, or 0-d. Add those of tensors for those of
    a model.
    """

    total: Array
    changed: Array
    unique: Array
    shared: Array
    histogram: Array
    pairwise: Array
    pairwise_conflicts: Array
    sign_conflicts: Array

    def __add__(self, other: Overlap) -> Overlap:
        names = [field.name for field in fields(self)]
        return Overlap(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, eq=False)
class Merged:
    """A merge before rounding, all of the base's shape.

    Attributes:
        value: the merged weights; the base itself where the update is 0.
        update: what the base is moved by.
        changers: how many agents changed the element.
        magnitude: size of the numbers that the value is computed from; rounding errors are
            proportional to it.
        contested: elements that ``ties`` decides within float32 rounding of a tie.
    """

    value: Array
    update: Array
    changers: Array
    magnitude: Array
    contested: Array


def task_vectors(
    base: Array,
    agents: Sequence[Array],
    *,
    epsilon: float = 1e-5,
    weight: Sequence[float] | None = None,
    normalize: bool = True,
) -> tuple[Array, Array]:
    """Task vectors and where they count as changes, both ``[agents, *shape]``."""
    base = np.asarray(base, dtype=np.float64)
    tau = np.stack([np.asarray(agent, dtype=np.float64) - base for agent in agents])
    if not normalize and weight is not None:
        tau = np.stack([w * t for w, t in zip(weight, tau, strict=True)])
    return tau, np.abs(tau) > epsilon


def overlap(base: Array, agents: Sequence[Array], **selection) -> Overlap:
    """Counts of one tensor. Keywords as for ``task_vectors``."""
    tau, changed = task_vectors(base, agents, **selection)
    n = range(len(agents))
    changers = changed.sum(axis=0)

    def conflict(i: int, j: int) -> Array:
        opposite = np.sign(tau[i]) != np.sign(tau[j])
        return changed[i] & changed[j] & opposite

    conflicts = [[conflict(i, j) for j in n] for i in n]
    return Overlap(
        total=np.array(changers.size),
        changed=np.array([changed[i].sum() for i in n]),
        unique=np.array([(changed[i] & (changers == 1)).sum() for i in n]),
        shared=np.array([(changed[i] & (changers >= 2)).sum() for i in n]),
        histogram=np.array([[(changed[i] & (changers == 1 + k)).sum() for k in n] for i in n]),
        pairwise=np.array([[(changed[i] & changed[j]).sum() for j in n] for i in n]),
        pairwise_conflicts=np.array([[conflicts[i][j].sum() for j in n] for i in n]),
        sign_conflicts=np.any(np.array(conflicts), axis=(0, 1)).sum(),
    )


def model_overlap(model: Sequence[tuple[Array, Sequence[Array]]], **selection) -> Overlap:
    """Counts over all (base, agents) of a model."""
    return reduce(add, [overlap(base, agents, **selection) for base, agents in model])


def rescaling(
    counts: Overlap, *, r: float = 0.1, alpha: float = 0.2, ratio: str = "unique"
) -> list[float]:
    """λ of every agent."""
    factors = []
    for s, u in zip(counts.shared.tolist(), counts.unique.tolist(), strict=True):
        if u == 0:
            rho = alpha if s > 0 else 0.0
        elif ratio == "unique":
            rho = s / u
        else:
            rho = s / (s + u)
        factors.append(1 + r * min(max(rho, 0.0), alpha))
    return factors


def ram(
    base: Array,
    agents: Sequence[Array],
    *,
    epsilon: float = 1e-5,
    weight: Sequence[float] | None = None,
    normalize: bool = True,
    lambda_: float = 1.0,
    shared: str = "mean",
    density: Sequence[float] | None = None,
    keep_unique: Sequence[bool] | None = None,
    factors: Sequence[float] | None = None,
) -> Merged:
    """``ram``, or ``ramplus`` where ``factors`` are its λ. Parameters as in a recipe, ``lambda`` as
    ``lambda_``.
    """
    ones = [1.0] * len(agents)
    weight, density, factors = weight or ones, density or ones, factors or ones
    keep_unique = keep_unique or [True] * len(agents)

    base = np.asarray(base, dtype=np.float64)
    tau, changed = task_vectors(base, agents, epsilon=epsilon, weight=weight, normalize=normalize)
    changers = changed.sum(axis=0)
    update, magnitude = np.zeros(base.shape), np.zeros(base.shape)
    contested = np.zeros(base.shape, dtype=bool)

    for i, (factor, keep) in enumerate(zip(factors, keep_unique, strict=True)):
        unique = changed[i] & (changers == 1)
        if keep:
            update[unique] = factor * tau[i][unique]

    several = changers >= 2
    importance = np.array(weight if normalize else ones)
    vectors, masks = (tau * changed)[:, several], changed[:, several]
    if shared == "ties":
        vectors, masks, contested[several] = _agreeing(vectors, importance, density)
    if shared != "drop":
        update[several], magnitude[several] = _mean(vectors, masks, importance)

    update, magnitude = lambda_ * update, np.abs(lambda_) * magnitude
    return Merged(
        value=np.where(update == 0, base, base + update),
        update=update,
        changers=changers,
        magnitude=np.abs(base) + np.maximum(magnitude, np.abs(update)),
        contested=contested,
    )


def ramplus(
    base: Array,
    agents: Sequence[Array],
    *,
    r: float = 0.1,
    alpha: float = 0.2,
    ratio: str = "unique",
    counts: Overlap | None = None,
    **parameters,
) -> Merged:
    """``ramplus`` with the ratio over ``counts``, or ``ramplus_tl``, over this tensor, without."""
    if counts is None:
        names = {"epsilon", "weight", "normalize"} & parameters.keys()
        counts = overlap(base, agents, **{name: parameters[name] for name in names})
    factors = rescaling(counts, r=r, alpha=alpha, ratio=ratio)
    return ram(base, agents, factors=factors, **parameters)


def _mean(vectors: Array, masks: Array, weight: Array) -> tuple[Array, Array]:
    """Σwτ/Σw over the masked agents ``[agents, elements]``, 0 where no weight is left; and its
    magnitude.
    """
    total = weight @ (vectors * masks)
    mass = np.abs(weight) @ (np.abs(vectors) * masks)
    divisor, size = weight @ masks, np.abs(weight) @ masks
    empty = divisor == 0
    divisor, size = np.where(empty, 1, divisor), np.where(empty, 1, size)
    mean = np.where(empty, 0, total / divisor)
    return mean, np.where(empty, 0, mass / np.abs(divisor) * size / np.abs(divisor))


def _agreeing(
    vectors: Array, weight: Array, density: Sequence[float]
) -> tuple[Array, Array, Array]:
    """TIES: pruned task vectors, which agree with the elected sign, and where that is contested."""
    contested = np.zeros(vectors.shape[1], dtype=bool)
    vectors = vectors.copy()
    for vector, fraction in zip(vectors, density, strict=True):
        size = np.abs(vector)
        k = int((1 - fraction) * size.size)
        if k > 0:
            smallest_kept = np.sort(size)[k - 1]
            contested |= (size != smallest_kept) & (
                np.abs(size - smallest_kept) <= _CONTESTED * smallest_kept
            )
            vector[size < smallest_kept] = 0
    mass = weight @ vectors
    contested |= np.abs(mass) < _CONTESTED * (np.abs(weight) @ np.abs(vectors))
    elected = np.sign(mass)
    agree = (np.sign(weight[:, None] * vectors) == elected) & (elected != 0)
    return vectors, agree, contested


def rounded(values: Array, dtype: str) -> Array:
    """float64 values rounded once to a dtype's nearest number, ties to even. No overflow to
    infinity.
    """
    step = ulp(values, dtype)
    return np.rint(values / step) * step


def ulp(values: Array, dtype: str) -> Array:
    """Distance between the numbers of a dtype, given by torch's name, about each value."""
    bits, smallest = _FORMATS[dtype]
    _, exponent = np.frexp(values)
    return np.ldexp(1.0, np.maximum(exponent - 1, smallest) - (bits - 1))


# The authors' modes, from the table in docs/parameters.md, on state dicts.


def _deltas(base: StateDict, agents: Sequence[StateDict], name: str, threshold: float):
    deltas = [np.float64(agent[name]) - np.float64(base[name]) for agent in agents]
    return [np.where(np.abs(delta) > threshold, delta, 0.0) for delta in deltas]


def arm(base: StateDict, agents: Sequence[StateDict], threshold: float = 1e-5) -> dict[str, Array]:
    """Mean over those who changed an element."""
    merged = {}
    for name in base:
        deltas = _deltas(base, agents, name, threshold)
        changers = sum((delta != 0).astype(int) for delta in deltas)
        merged[name] = np.array(base[name] + sum(deltas) / np.maximum(changers, 1))
    return merged


def arm_r(
    base: StateDict,
    agents: Sequence[StateDict],
    rescale_factor: float,
    threshold: float = 1e-5,
) -> dict[str, Array]:
    """Unique updates grow with shared / changed, counted over the model."""
    shared, unique = _model_counts(base, agents, threshold)
    ratios = [s / (s + u) if s + u else 0.0 for s, u in zip(shared, unique)]
    return _rescaled(base, agents, ratios, rescale_factor, threshold)


def arm_r_v2(
    base: StateDict,
    agents: Sequence[StateDict],
    rescale_factor: float,
    threshold: float = 1e-5,
) -> dict[str, Array]:
    """Unique updates grow with shared / unique. Raises ZeroDivisionError for an agent with shared
    ones only.
    """
    shared, unique = _model_counts(base, agents, threshold)
    ratios = [s / u if s + u else 0.0 for s, u in zip(shared, unique)]
    return _rescaled(base, agents, ratios, rescale_factor, threshold)


def arm_ties(
    base: StateDict, agents: Sequence[StateDict], threshold: float = 1e-5
) -> dict[str, Array]:
    """TIES at density 0.1 on the shared elements of each tensor."""
    merged = arm(base, agents, threshold)
    for name in base:
        deltas = np.stack(_deltas(base, agents, name, threshold))
        shared = np.argwhere((deltas != 0).sum(axis=0) >= 2)
        columns = [deltas[(slice(None), *where)] for where in shared]
        k = int(0.9 * len(columns))
        cutoffs = [0.0] * len(agents)
        if k > 0:
            cutoffs = np.sort(np.abs(columns), axis=0)[k - 1]
        kept = [[d if abs(d) >= c else 0.0 for d, c in zip(column, cutoffs)] for column in columns]
        if not np.any(kept):
            continue
        for where, column in zip(map(tuple, shared), kept):
            positive = [d for d in column if d > 0]
            negative = [d for d in column if d < 0]
            mass = sum(positive) + sum(negative)
            agreeing = positive if mass > 0 else negative if mass < 0 else [0.0]
            merged[name][where] = base[name][where] + sum(agreeing) / len(agreeing)
    return merged


def arm_unique(
    base: StateDict,
    agents: Sequence[StateDict],
    target: int,
    threshold: float = 1e-5,
) -> dict[str, Array]:
    """What the target agent alone changed, divided by the number of agents."""
    merged = {}
    for name in base:
        deltas = _deltas(base, agents, name, threshold)
        changers = sum((delta != 0).astype(int) for delta in deltas)
        alone = np.where(changers == 1, deltas[target], 0.0)
        merged[name] = base[name] + alone / len(agents)
    return merged


def _model_counts(
    base: StateDict, agents: Sequence[StateDict], threshold: float
) -> tuple[list[int], list[int]]:
    shared, unique = [0] * len(agents), [0] * len(agents)
    for name in base:
        changed = [d != 0 for d in _deltas(base, agents, name, threshold)]
        changers = sum(mask.astype(int) for mask in changed)
        for i, mask in enumerate(changed):
            shared[i] += int(np.sum(mask & (changers > 1)))
            unique[i] += int(np.sum(mask & (changers == 1)))
    return shared, unique


def _rescaled(
    base: StateDict,
    agents: Sequence[StateDict],
    ratios: Sequence[float],
    rescale_factor: float,
    threshold: float,
) -> dict[str, Array]:
    strength = max(rescale_factor, 1.0) - 1.0
    merged = {}
    for name in base:
        deltas = _deltas(base, agents, name, threshold)
        changers = sum((delta != 0).astype(int) for delta in deltas)
        mean = sum(deltas) / np.maximum(changers, 1)
        scaled = sum((1 + strength * min(ratio, 1.0)) * d for ratio, d in zip(ratios, deltas))
        merged[name] = base[name] + np.where(changers == 1, scaled, mean)
    return merged
