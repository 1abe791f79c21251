"""Reinforced Agent Merging of one tensor: tensors in, a tensor out. Pure torch, nothing of
mergekit.

For base weights θ₀ and agents θᵢ with task vectors τᵢ = θᵢ − θ₀, an element is changed by agent i
where abs(τᵢ) > epsilon. Elements nobody changed keep the base's bits, elements several agents
changed take the mean of the changes, elements one agent changed keep that change, rescaled. Source:
Yuan et al., 2026, "Reinforced Agent Merging", arXiv 2601.13572.

A tensor is streamed in blocks that stay in cache, through scratch buffers allocated once: memory
beyond the output is a few MB whatever the size. The exception is ``shared="ties"`` with a density
below 1, which has to rank the shared elements and holds one float per shared element and agent
meanwhile.

Arithmetic is float32, float64 where an input or the output is float64, rounded once to the output
dtype.

Inside, masks are 0/1 floats and task vectors are negated (base − agent). Both are for speed and
exactness on the CPU: comparisons that write bool, and ``torch.where``, cost five times a float
operation (measured: 184 against 31 microseconds for 262 144 elements), and base − (+0) keeps the
base's bits where base + (+0) would lose the sign of −0.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mergekit_ram.errors import NonFiniteError, OutputOverflowError
from mergekit_ram.method import compiled
from mergekit_ram.method.arguments import require, require_count
from mergekit_ram.method.overlap import OverlapCounts
from mergekit_ram.method.rule import PLAIN, Agent, Rule
from mergekit_ram.method.tally import Tally, has_patterns

# Scratch that stays in a CPU's last-level cache; a GPU wants fewer, larger launches.
_CPU_SCRATCH_BYTES = 10 << 20
_ACCELERATOR_SCRATCH_BYTES = 40 << 20
_BLOCK_MULTIPLE = 1024
# Compiled steps keep nothing between each other but one pattern an element: fewer, larger calls.
_COMPILED_BLOCK = 1 << 20


@dataclass(frozen=True)
class Merged:
    """A merged tensor and what was found out on the way.

    Attributes:
        tensor: contiguous, of the base's shape.
        counts: overlap of the agents, None where that was not asked for.
        overflowed: elements that are not finite although every input is. 0 unless ``rule.finite``
            is False.
    """

    tensor: torch.Tensor
    counts: OverlapCounts | None
    overflowed: int


def merge(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule = PLAIN,
    *,
    input_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    block_elements: int | None = None,
) -> torch.Tensor:
    """Merge the agents into the base.

    Args:
        base: θ₀, any floating dtype, shape and strides. Borrowed, never modified.
        agents: of the base's shape and device; dtypes may differ.
        input_dtype: round every input to this dtype first. None takes them as they are.
        out_dtype: dtype of the result. None promotes the inputs' dtypes.
        block_elements: elements a block, for tests; the result does not depend on it.

    Returns:
        A new contiguous tensor of the base's shape, on its device. It carries no autograd graph.

    Raises:
        ValueError: shapes, devices or dtypes that cannot be merged.
        NonFiniteError: NaN or infinity in an input, unless ``rule.finite`` is False.
        OutputOverflowError: the inputs are finite and the result is not, likewise.
    """
    stream = _Stream(base, agents, rule, input_dtype, out_dtype, block_elements, counting=False)
    return stream.merge().tensor


def merge_and_count(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule = PLAIN,
    *,
    input_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    block_elements: int | None = None,
) -> tuple[torch.Tensor, OverlapCounts]:
    """``merge``, and the overlap counts of the very masks it merged by."""
    stream = _Stream(base, agents, rule, input_dtype, out_dtype, block_elements, counting=True)
    merged = stream.merge()
    return merged.tensor, merged.counts


def merge_in_full(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule,
    *,
    counting: bool,
    input_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Merged:
    """``merge`` with everything that it finds out. Arguments as there.

    Args:
        counting: count the overlap too.
    """
    stream = _Stream(base, agents, rule, input_dtype, out_dtype, None, counting)
    return stream.merge()


def count(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule = PLAIN,
    *,
    input_dtype: torch.dtype | None = None,
    block_elements: int | None = None,
) -> OverlapCounts:
    """Overlap counts of the agents' updates, in the order of ``agents``. Arguments as for
    ``merge``.
    """
    stream = _Stream(base, agents, rule, input_dtype, None, block_elements, counting=True)
    stream.count()
    return stream.tally.counts()


def task_vectors(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule = PLAIN,
    *,
    block_elements: int,
    input_dtype: torch.dtype | None = None,
    every: int = 1,
) -> Iterator[torch.Tensor]:
    """The agents' task vectors τ, block by block, for whoever measures them.

    Args:
        block_elements: most elements a block.
        every: of every so many blocks only the middle one, so that a sample is spread evenly over
            the tensor.

    Yields:
        ``[agents, elements]`` in the compute dtype: the numbers that are compared with epsilon,
        weighted where ``rule.normalize`` is False. Valid until the next block, which takes the same
        memory; free to be overwritten.
    """
    stream = _Stream(base, agents, rule, input_dtype, None, block_elements, counting=False)
    longest = stream.rows.base.shape[0]
    vectors = stream.rows.base.new_empty(len(agents), longest)
    for index, rows in stream.blocks(every):
        yield stream.subtract(index, rows, vectors[:, : rows.base.shape[0]])


@dataclass(frozen=True)
class _Rows:
    """Scratch of one block: rows of its length in the compute dtype. Untouched
    rows cost no memory.
    """

    base: torch.Tensor  # θ₀, finally the result
    total: torch.Tensor  # Σ wᵢ(θ₀ − θᵢ) over the agents that changed the element
    divisor: torch.Tensor  # Σ wᵢ over the same agents
    unique: torch.Tensor  # Σ uᵢ(θ₀ − θᵢ), uᵢ what unique updates are scaled by
    changers: torch.Tensor  # how many agents changed the element
    mask: torch.Tensor  # 1 where the agent at hand changed the element
    deltas: torch.Tensor  # [agents or 1, block], θ₀ − θᵢ, zero where unchanged

    @classmethod
    def allocate(
        cls, agents: int, elements: int, dtype: torch.dtype, device: torch.device
    ) -> _Rows:
        rows = torch.empty(6 + agents, elements, dtype=dtype, device=device)
        return cls(*rows[:6], rows[6:])

    def first(self, elements: int) -> _Rows:
        """Views of the first elements of every row."""
        if elements == self.base.shape[0]:
            return self
        return _Rows(*(row[..., :elements] for row in vars(self).values()))


class _Stream:
    """One tensor's inputs, and how to take them block by block through the same scratch rows."""

    def __init__(
        self,
        base: torch.Tensor,
        agents: Sequence[Agent],
        rule: Rule,
        input_dtype: torch.dtype | None,
        out_dtype: torch.dtype | None,
        block_elements: int | None,
        counting: bool,
    ):
        _check(base, agents, rule, input_dtype, out_dtype, block_elements)
        tensors = [base.detach(), *(agent.tensor.detach() for agent in agents)]
        self.shape = base.shape
        self.agents = agents
        self.rule = rule
        self.ties = rule.shared == "ties"
        # Equal weights cancel in Σwτ/Σw; a weight of 0 must not.
        self.weighted = rule.normalize and any(
            agent.weight != agents[0].weight or agent.weight == 0 for agent in agents
        )
        # RAM and RAM+ as the paper has them.
        self.simple = (
            rule.shared == "mean"
            and rule.scale == 1
            and not self.weighted
            and all(agent.keep_unique for agent in agents)
        )
        self.rescaled = any(agent.rescaling != 1 for agent in agents)

        dtypes = [input_dtype or tensor.dtype for tensor in tensors]
        self.input_dtype = input_dtype
        self.out_dtype = out_dtype or functools.reduce(torch.promote_types, dtypes)
        wide = torch.float64 in (*dtypes, self.out_dtype)
        self.dtype = torch.float64 if wide else torch.float32
        self.threshold = round_down(rule.epsilon, self.dtype)
        # A 16-bit weight times a small integer is exact in float32.
        self.exact_products = all(dtype.itemsize <= 2 for dtype in dtypes)

        flat = all(tensor.is_contiguous() for tensor in tensors)
        if flat:
            tensors = [tensor.view(-1) for tensor in tensors]
        self.base, *self.inputs = tensors
        on_cpu = base.device.type == "cpu"
        unweighted = rule.normalize or all(agent.weight == 1 for agent in agents)
        self.compiled = (
            on_cpu
            and flat
            and self.simple
            and unweighted
            and compiled.enabled()
            and (not counting or has_patterns(len(agents)))
        )
        # Comparing ends at the first difference, so it is nearly free where an agent moved.
        # ``ties`` needs all.
        alike = all(tensor.dtype == base.dtype for tensor in tensors)
        # Infinity equals infinity and their difference is NaN, so what may be infinite is not
        # skipped.
        self.skipping = on_cpu and alike and not self.ties and rule.finite
        budget = _CPU_SCRATCH_BYTES if on_cpu else _ACCELERATOR_SCRATCH_BYTES
        deltas = len(agents) if self.ties else 1
        directions = Tally.rows(len(agents)) if counting else 0
        fitting = budget // ((8 + deltas + directions) * self.dtype.itemsize)
        cached = max(1, fitting // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE
        self.limit = block_elements or (_COMPILED_BLOCK if self.compiled else cached)
        elements = min(self.limit, base.numel())
        self.rows = _Rows.allocate(deltas, elements, self.dtype, base.device)
        self.tally = (
            Tally(len(agents), elements, self.dtype, base.device, nan=not rule.finite)
            if counting
            else None
        )
        # Sum of what must be finite: NaN and infinity survive every later addition.
        self.watched = torch.zeros((), dtype=self.dtype, device=base.device)

    def merge(self) -> Merged:
        cutoffs = self._cutoffs() if self.ties else []
        merged = torch.empty(self.base.shape, dtype=self.out_dtype, device=self.base.device)
        for index, rows in self.blocks():
            target = merged[index]
            if self.compiled:
                self._take_compiled(index, target)
                continue
            if self.tally:
                self.tally.begin(rows.base.shape[0])
            if self.simple:
                self._merge_simply(index, rows)
            else:
                self._accumulate(index, rows)
                if self.ties:
                    self._elect(rows, cutoffs)
                self._update(rows)
            if self.tally:
                self.tally.end()
            target.copy_(rows.base.view(target.shape))
            self.watched += target.sum()
        overflowed = 0
        if not math.isfinite(self.watched.item()):
            self._require_finite_inputs()
            overflowed = self._overflowed(merged)
            if overflowed and self.rule.finite:
                raise OutputOverflowError(overflowed, self.out_dtype)
        counts = self.tally.counts() if self.tally else None
        return Merged(merged.view(self.shape), counts, overflowed)

    def count(self) -> None:
        for index, rows in self.blocks():
            if self.compiled:
                self._take_compiled(index, None)
                continue
            self.tally.begin(rows.base.shape[0])
            for i, delta in self._deltas(index, rows):
                self.watched += delta.sum()
                self.tally.add(i, delta)
            self.tally.end()
        if not math.isfinite(self.watched.item()):
            self._require_finite_inputs()

    def blocks(self, every: int = 1) -> Iterator[tuple[tuple, _Rows]]:
        """The index of every block, or of the middle one of so many, with scratch rows of the
        block's length.
        """
        indices = _block_indices(self.base.shape, self.limit)
        for index in itertools.islice(indices, every // 2, None, every):
            yield index, self.rows.first(self.base[index].numel())

    def _take_compiled(self, index: tuple, target: torch.Tensor | None) -> None:
        """Merge a block into the target, if there is one, and count it, if that is asked for."""
        base, *agents = (tensor[index] for tensor in (self.base, *self.inputs))
        if self.input_dtype is not None:
            base, *agents = (tensor.to(self.input_dtype) for tensor in (base, *agents))
        gains = [agent.rescaling - 1 for agent in self.agents] if self.rescaled else []
        numbers = torch.tensor([self.threshold, *gains], dtype=self.dtype)
        patterns = deltas = None
        if self.tally:
            patterns = self.tally.patterns(base.numel(), base.dtype)
            if target is None:
                deltas = self.rows.total.view(base.dtype)[: base.numel()]
        compiled.take_block(
            base,
            agents,
            numbers,
            self.exact_products,
            target,
            patterns,
            deltas,
            nan=not self.rule.finite,
        )
        self.watched += (deltas if target is None else target).sum()
        if self.tally:
            self.tally.end()

    def _deltas(
        self, index: tuple, rows: _Rows, first: torch.Tensor | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each agent's place and negated task vector, zero where unchanged. Only ``ties`` keeps
        them all.

        An agent that has the base's very weights here may be left out.

        Args:
            first: row for the first one, which otherwise shares its row with the others.
        """
        block, untouched = self.base[index], True
        self._load(block, rows.base)
        for i, (agent, tensor) in enumerate(zip(self.agents, self.inputs)):
            if self.skipping and torch.equal(block, tensor[index]):
                continue
            delta = rows.deltas[i if self.ties else 0]
            if untouched and first is not None:
                delta = first
            untouched = False
            self._load(tensor[index], delta)
            torch.sub(rows.base, delta, out=delta)
            if not self.rule.normalize and agent.weight != 1:
                delta.mul_(agent.weight)
            # Zero up to the threshold, itself beyond it: strictly greater, in one pass.
            yield i, torch.hardshrink(delta, self.threshold, out=delta)
        if untouched:
            # Otherwise a base that is not finite shows in the deltas.
            self.watched += rows.base.sum()

    def subtract(self, index: tuple, rows: _Rows, vectors: torch.Tensor) -> torch.Tensor:
        """Fill ``vectors``, ``[agents, elements]``, with the task vectors of a block."""
        self._load(self.base[index], rows.base)
        for agent, tensor, vector in zip(self.agents, self.inputs, vectors):
            self._load(tensor[index], vector)
            vector.sub_(rows.base)
            if not self.rule.normalize and agent.weight != 1:
                vector.mul_(agent.weight)
        return vectors

    def _load(self, block: torch.Tensor, row: torch.Tensor) -> None:
        if self.input_dtype is not None:
            block = block.to(self.input_dtype)
        row.view(block.shape).copy_(block)

    def _merge_simply(self, index: tuple, rows: _Rows) -> None:
        """Turn the base row into the merged one: plain means, unique updates scaled by λᵢ = 1 + (λᵢ
        − 1).
        """
        started = False
        # The first delta is the sum so far: that saves an eighth of the time with three agents.
        for i, delta in self._deltas(index, rows, first=rows.total):
            gain = self.agents[i].rescaling - 1
            if not started:
                torch.ne(delta, 0, out=rows.changers)
                if self.rescaled:
                    torch.mul(delta, gain, out=rows.unique)
            else:
                rows.changers.add_(torch.ne(delta, 0, out=rows.mask))
                rows.total.add_(delta)
                if self.rescaled:
                    rows.unique.add_(delta, alpha=gain)
            started = True
            if self.tally:
                self.tally.add(i, delta)
        if not started:
            return
        if self.rescaled:
            alone = torch.lt(rows.changers, 2, out=rows.mask)
        divisor = rows.changers.clamp_(min=1)
        if self.exact_products and not self.rescaled:
            rows.base.mul_(divisor).sub_(rows.total).div_(divisor)
        else:
            rows.base.addcdiv_(rows.total, divisor, value=-1)
        if self.rescaled:
            rows.base.addcmul_(rows.unique, alone, value=-1)

    def _accumulate(self, index: tuple, rows: _Rows) -> None:
        """Sum the agents' deltas and masks."""
        mean = self.rule.shared == "mean"
        for row in (rows.total, rows.divisor, rows.unique, rows.changers):
            row.zero_()
        for i, delta in self._deltas(index, rows):
            agent = self.agents[i]
            rows.changers.add_(torch.ne(delta, 0, out=rows.mask))
            if mean:
                weight = agent.weight if self.weighted else 1
                rows.total.add_(delta, alpha=weight)
                if self.weighted:
                    rows.divisor.add_(rows.mask, alpha=weight)
            if agent.keep_unique:
                rows.unique.add_(delta, alpha=agent.rescaling * self.rule.scale)
            elif not mean:
                # Nothing of it may show in the result.
                self.watched += delta.sum()
            if self.tally:
                self.tally.add(i, delta)

    def _require_finite_inputs(self) -> None:
        """Refuse inputs that are not finite. What is watched may also overflow by itself, so look
        again.
        """
        if not self.rule.finite:
            return
        counts = [
            sum(
                tensor[index].numel() - int(tensor[index].isfinite().sum())
                for index in _block_indices(tensor.shape, self.limit)
            )
            for tensor in (self.base, *self.inputs)
        ]
        if any(counts):
            raise NonFiniteError(counts)

    def _overflowed(self, merged: torch.Tensor) -> int:
        """Elements that are not finite where every input is."""
        overflowed = 0
        for index in _block_indices(self.base.shape, self.limit):
            lost = ~merged[index].isfinite()
            if lost.any():
                for tensor in (self.base, *self.inputs):
                    block = tensor[index]
                    if self.input_dtype is not None:
                        block = block.to(self.input_dtype)
                    lost &= block.isfinite()
                overflowed += int(lost.sum())
        return overflowed

    def _cutoffs(self) -> list[float]:
        """Per agent, the magnitude below which ``shared="ties"`` prunes its shared updates.

        With d shared elements in the tensor that is the k-th smallest of the agent's d magnitudes
        there, k = int((1 − density) · d); 0, which prunes nothing, where k = 0.
        """
        pruning = [i for i, agent in enumerate(self.agents) if agent.density < 1]
        magnitudes: dict[int, list[torch.Tensor]] = {i: [] for i in pruning}
        for index, rows in self.blocks() if pruning else ():
            rows.changers.zero_()
            for _, delta in self._deltas(index, rows):
                rows.changers.add_(torch.ne(delta, 0, out=rows.mask))
            (shared,) = torch.nonzero(rows.changers >= 2, as_tuple=True)
            for i in pruning:
                magnitudes[i].append(rows.deltas[i][shared].abs_())
        cutoffs = [0.0] * len(self.agents)
        for i in pruning:
            ranked = torch.cat([self.rows.base[:0], *magnitudes.pop(i)])
            k = int((1 - self.agents[i].density) * ranked.numel())
            if k > 0:
                cutoffs[i] = ranked.kthvalue(k).values.item()
        return cutoffs

    def _elect(self, rows: _Rows, cutoffs: list[float]) -> None:
        """Prune, elect the sign with the greater mass, and total the updates that agree with it."""
        elected = rows.mask.zero_()
        for agent, delta, cutoff in zip(self.agents, rows.deltas, cutoffs):
            if cutoff > 0:
                torch.hardshrink(delta, _next_below(cutoff, self.dtype), out=delta)
            if self.weighted:
                delta.mul_(agent.weight)
            elected.add_(delta)
        elected.sign_()
        for agent, delta in zip(self.agents, rows.deltas):
            delta.mul_(elected).clamp_(min=0)
            rows.total.add_(delta)
            delta.ne_(0)
            rows.divisor.add_(delta, alpha=agent.weight if self.weighted else 1)
        rows.total.mul_(elected)

    def _update(self, rows: _Rows) -> None:
        """Turn the base row into the merged one."""
        if self.weighted or self.ties:
            # No agent, or only agents of weight 0, changed the element: nothing to divide.
            rows.divisor.add_(torch.eq(rows.divisor, 0, out=rows.mask))
        else:
            torch.clamp(rows.changers, min=1, out=rows.divisor)
        shared = torch.ge(rows.changers, 2, out=rows.mask)
        rows.total.div_(rows.divisor).mul_(shared).mul_(self.rule.scale)
        rows.unique.addcmul_(rows.unique, shared, value=-1)
        rows.base.sub_(rows.total.add_(rows.unique))


def _check(
    base: torch.Tensor,
    agents: Sequence[Agent],
    rule: Rule,
    input_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    block_elements: int | None,
) -> None:
    """Refuse arguments of ``merge`` that cannot be merged."""
    require(isinstance(base, torch.Tensor), "base", base, "a tensor")
    require(isinstance(rule, Rule), "rule", rule, "a Rule")
    tensors = {"base": base}
    for i, agent in enumerate(agents):
        require(isinstance(agent, Agent), f"agents[{i}]", agent, "an Agent")
        tensors[f"agents[{i}]"] = agent.tensor
    for name, tensor in tensors.items():
        require(_is_wide(tensor.dtype), f"dtype of {name}", tensor.dtype, _WIDE)
        if tensor.shape != base.shape:
            raise ValueError(
                f"shapes differ: base {tuple(base.shape)}, {name} {tuple(tensor.shape)}"
            )
        if tensor.device != base.device:
            raise ValueError(f"devices differ: base on {base.device}, {name} on {tensor.device}")
    for name, dtype in {"input_dtype": input_dtype, "out_dtype": out_dtype}.items():
        require(dtype is None or _is_wide(dtype), name, dtype, _WIDE)
    if block_elements is not None:
        require_count("block_elements", block_elements, least=1)


_WIDE = "a floating dtype of 16 bits or more"


def _is_wide(dtype: object) -> bool:
    is_dtype = isinstance(dtype, torch.dtype)
    return is_dtype and dtype.is_floating_point and dtype.itemsize >= 2


@functools.lru_cache(maxsize=256)
def round_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of dtype not above value, so that x > value decides alike for every x of
    dtype.
    """
    rounded = torch.tensor(value, dtype=dtype)
    return rounded.item() if rounded.item() <= value else _next_below(rounded, dtype)


def _next_below(value: float | torch.Tensor, dtype: torch.dtype) -> float:
    """The next number of dtype towards minus infinity."""
    value = torch.as_tensor(value, dtype=dtype)
    return torch.nextafter(value, torch.tensor(-math.inf, dtype=dtype)).item()


def _block_indices(shape: Sequence[int], limit: int) -> Iterator[tuple]:
    """Indices that cut a tensor into blocks of at most ``limit`` elements, each contiguous if the
    tensor is.
    """
    if 0 in shape:
        return
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield ()
        return
    step = limit // inner
    for outer in itertools.product(*map(range, shape[: axis - 1])):
        for start in range(0, shape[axis - 1], step):
            yield (*outer, slice(start, start + step))
