"""Random cases of the kernel, and what the float64 oracle says of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st

from mergekit_ram.method.stream import Agent, Rule
from support import oracle
from support.tensors import BF16, F16, F32, F64, array, bits, dtype_name

DTYPES = (BF16, F16, F32, F64)
LAYOUTS = ("contiguous", "transposed", "strided", "expanded")
BLOCKS = (None, 1, 3, 7, 64)


def examples(number: int) -> settings:
    return settings(max_examples=number, derandomize=True, deadline=None, database=None)


@dataclass(frozen=True)
class Case:
    """One merge. ``exact`` where every sum and product that a decision hangs on is exact in
    float32.
    """

    base: torch.Tensor
    agents: list[Agent]
    rule: Rule
    exact: bool

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.base, *(agent.tensor for agent in self.agents)]

    def expected(self) -> oracle.Merged:
        base, *agents = map(array, self.tensors)
        return oracle.ram(
            base,
            agents,
            epsilon=self.rule.epsilon,
            weight=[agent.weight for agent in self.agents],
            normalize=self.rule.normalize,
            lambda_=self.rule.scale,
            shared=self.rule.shared,
            density=[agent.density for agent in self.agents],
            keep_unique=[agent.keep_unique for agent in self.agents],
            factors=[agent.rescaling for agent in self.agents],
        )

    def expected_counts(self) -> oracle.Overlap:
        base, *agents = map(array, self.tensors)
        return oracle.overlap(
            base,
            agents,
            epsilon=self.rule.epsilon,
            weight=[agent.weight for agent in self.agents],
            normalize=self.rule.normalize,
        )

    def promoted(self) -> torch.dtype:
        dtypes = [tensor.dtype for tensor in self.tensors]
        return functools.reduce(torch.promote_types, dtypes)

    def near_epsilon(self) -> bool:
        """Whether some task vector lies within float32 rounding of epsilon."""
        base, *agents = map(array, self.tensors)
        weight = [agent.weight for agent in self.agents]
        tau, _ = oracle.task_vectors(base, agents, weight=weight, normalize=self.rule.normalize)
        distance = np.abs(np.abs(tau) - self.rule.epsilon)
        return bool(np.any(distance < 2.0**-21 * np.abs(tau)))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def rounding_range(
    case: Case, expected: oracle.Merged, out: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """What the float64 evaluation may round to, given the rounding errors of
    the dtype computed in.
    """
    wide = F64 in (case.promoted(), out)
    steps = len(case.agents) + 8
    slack = steps * 2.0 ** (-52 if wide else -24) * expected.magnitude
    if wide and out.itemsize == 2:  # torch converts float64 by way of float32
        slack += 2.0**-24 * np.abs(expected.value)
    low = oracle.rounded(expected.value - slack, dtype_name(out))
    return low, oracle.rounded(expected.value + slack, dtype_name(out))


def assert_merged(result: torch.Tensor, case: Case, out: torch.dtype | None = None) -> None:
    out = out or case.promoted()
    assert result.dtype == out
    assert result.shape == case.base.shape
    assert result.is_contiguous()
    expected = case.expected()
    low, high = rounding_range(case, expected, out)
    got = array(result)
    right = (low <= got) & (got <= high)
    if not case.exact:
        right |= expected.contested
    assert right.all(), (got[~right], expected.value[~right])
    kept = expected.update == 0 if case.exact else expected.changers == 0
    kept = torch.as_tensor(kept)
    assert torch.equal(bits(result)[kept], bits(case.base.to(out))[kept])


def assert_counted(counts, expected: oracle.Overlap) -> None:
    for field in vars(expected):
        value = np.array(getattr(counts, field))
        assert np.array_equal(value, getattr(expected, field)), field


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in other strides; ``expanded`` repeats its first slice."""
    if tensor.dim() == 0 or layout == "contiguous":
        return tensor
    if layout == "transposed":
        axes = range(tensor.dim())
        return tensor.permute(*reversed(axes)).contiguous().permute(*reversed(axes))
    if layout == "strided":
        room = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 7.0)
        view = room.to(tensor.dtype)[..., ::2]
        return view.copy_(tensor)
    return tensor[:1].expand(tensor.shape)


def grid_tensors(rng, shape, sparsities) -> list[np.ndarray]:
    """Multiples of 2⁻⁶ that fit every dtype: exact sums, many ties, many task vectors exactly
    epsilon.
    """
    base = rng.integers(-64, 65, shape) / 64
    base = np.where(rng.random(shape) < 0.1, -0.0, base)
    agents = [base + rng.integers(-3, 4, shape) / 64 for _ in sparsities]
    return [base, *thinned(rng, base, agents, sparsities)]


def tuned_tensors(rng, shape, sparsities) -> list[np.ndarray]:
    """Weights and small changes as training makes them, across epsilon."""
    base = rng.normal(0, 0.02, shape)
    base = np.where(rng.random(shape) < 0.05, -0.0, base)
    agents = []
    for _ in sparsities:
        size = np.exp(rng.uniform(np.log(1e-6), np.log(0.02), shape))
        agents.append(base + rng.choice([-1, 1], shape) * size)
    return [base, *thinned(rng, base, agents, sparsities)]


def independent_tensors(rng, shape, sparsities) -> list[np.ndarray]:
    """Agents that have nothing to do with the base."""
    sizes = rng.choice([0.01, 1.0, 100.0], len(sparsities))
    base = rng.normal(0, 1, shape)
    agents = [rng.normal(0, size, shape) for size in sizes]
    return [base, *thinned(rng, base, agents, sparsities)]


def thinned(rng, base, agents, sparsities) -> list[np.ndarray]:
    return [
        np.where(rng.random(base.shape) < sparsity, base, agent)
        for agent, sparsity in zip(agents, sparsities, strict=True)
    ]


SOURCES = {
    grid_tensors: {
        "epsilon": (0.0, 1e-5, 1 / 64, 2 / 64, 0.03),
        # Of a set with both signs, no subset sums to zero.
        "weights": ((1.0,), (0.5, 1.0, 2.0, 3.0), (0.0, 1.0, 0.5), (-0.25, 8.0)),
        "density": (0.1, 0.25, 0.5, 0.9, 1.0),
        "scale": (1.0, 0.5, -2.0, 0.0),
        "rescaling": (1.0, 1.25, 2.0),
    },
    tuned_tensors: {
        "epsilon": (0.0, 1e-5, 1e-4),
        "weights": ((1.0,), (0.3, 0.7, 1.9), (0.0, 0.6, 1.1), (-0.3, 11.0)),
        "density": (0.1, 0.2, 0.3, 0.7, 1.0),
        "scale": (1.0, 0.7, -1.3),
        "rescaling": (1.0, 1.02, 1.1),
    },
}
SOURCES[independent_tensors] = SOURCES[tuned_tensors]


@st.composite
def cases(draw, dtypes=DTYPES) -> Case:
    source = draw(st.sampled_from(list(SOURCES)))
    values = {key: st.sampled_from(given) for key, given in SOURCES[source].items()}
    n = draw(st.integers(1, 8))
    longest, dimensions = draw(st.sampled_from(((1, 0), (90, 1), (9, 2), (5, 3), (4, 4))))
    sizes = st.lists(st.integers(0, longest), min_size=dimensions, max_size=dimensions)
    shape = tuple(draw(sizes))
    sparsities = draw(st.lists(st.sampled_from((0.0, 0.2, 0.7, 0.95, 1.0)), min_size=n, max_size=n))
    dtype = st.sampled_from(dtypes)
    one_dtype = draw(st.one_of(st.none(), dtype))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensors = []
    for weights in source(rng, shape, sparsities):
        tensor = torch.tensor(weights).to(one_dtype or draw(dtype))
        tensors.append(laid_out(tensor, draw(st.sampled_from(LAYOUTS))))
    weights = st.sampled_from(draw(values["weights"]))
    agents = [
        Agent(
            tensor,
            weight=draw(weights),
            density=draw(values["density"]),
            keep_unique=draw(st.sampled_from((True, True, False))),
            rescaling=draw(values["rescaling"]),
        )
        for tensor in tensors[1:]
    ]
    if draw(st.booleans()):
        agents = [Agent(tensor) for tensor in tensors[1:]]
    rule = Rule(
        epsilon=draw(values["epsilon"]),
        normalize=draw(st.booleans()),
        scale=draw(values["scale"]),
        shared=draw(st.sampled_from(("mean", "ties", "drop"))),
    )
    case = Case(tensors[0], agents, rule, exact=source is grid_tensors)
    assume(case.exact or not case.near_epsilon())
    return case


def realistic(
    shape=(64, 257), agents: int = 3, dtype=BF16, change: float = 1e-3, seed: int = 0
) -> Case:
    """Weights of size 0.02, a third of which every agent changes by ``change`` of their size, ± a
    factor.
    """
    rng = np.random.default_rng(seed)
    base = torch.tensor(rng.normal(0, 0.02, shape)).to(dtype)
    tensors = []
    for _ in range(agents):
        factor = change * np.clip(rng.normal(0, 1, shape), -2, 2)
        moved = (array(base) * (1 + factor)) * 1.0
        (tensor,) = thinned(rng, array(base), [moved], [0.67])
        tensors.append(Agent(torch.tensor(tensor).to(dtype)))
    case = Case(base, tensors, Rule(), exact=False)
    assert not case.near_epsilon()
    return case
