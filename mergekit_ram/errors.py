"""Every exception of the package. All can be pickled, as the way to and from other processes needs,
and come back alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click


def _restored(
    kind: type[BaseException], arguments: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class _Picklable(Exception):
    """An exception that is restored from what it holds, without being built
    from its message again.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


class NonFiniteError(_Picklable, ValueError):
    """NaN or infinity in an input tensor.

    Attributes:
        counts: non-finite elements of each input, the base's first.
    """

    def __init__(self, counts: Sequence[int]):
        self.counts = tuple(counts)
        super().__init__(f"NaN or infinity among the inputs: {list(counts)} elements")


class OutputOverflowError(_Picklable, ValueError):
    """A merged tensor that is not finite although every input is.

    Attributes:
        count: elements that are not finite.
        dtype: of the merged tensor.
    """

    def __init__(self, count: int, dtype: object):
        self.count = count
        self.dtype = str(dtype).removeprefix("torch.")
        super().__init__(f"{count} elements overflow {self.dtype}")


class MergeError(_Picklable, click.ClickException, ValueError):
    """What a person who merges can put right. mergekit's commands show its message, not a
    traceback.
    """

    def __str__(self) -> str:
        return self.message


class ParameterError(MergeError):
    """Parameters that no merge can use. The message names parameter, value and tensor."""


class NonFiniteWeightsError(MergeError):
    """NaN or infinity in a model's weights. The message names models, tensor and counts."""

    def __init__(self, tensor: str | None, counts: Mapping[Hashable, int]):
        found = ", ".join(f"{count} in {model}" for model, count in counts.items())
        super().__init__(
            f"NaN or infinity in {tensor or 'an unnamed tensor'}: {found}. The checkpoint is "
            "damaged or overflowed; replace it, or set non_finite: ignore to merge it as it is"
        )


class OverflowedWeightsError(MergeError):
    """Merged weights that are not finite although all inputs are. The message names tensor and
    count.
    """

    def __init__(self, tensor: str | None, count: int, dtype: str):
        super().__init__(
            f"{count} elements of {tensor or 'an unnamed tensor'} overflow {dtype} when they "
            "are merged, though all inputs are finite. Use dtype or out_dtype bfloat16 or "
            "float32, a smaller lambda or r, or set non_finite: ignore to write infinity there"
        )


class WriteError(MergeError):
    """The merged model cannot be written. The message names the file and the reason."""


class MalformedRecipeError(MergeError):
    """A file that holds no recipe. The message names the file, the places in it and what was
    expected there.

    Attributes:
        faults: what is wrong, one by one.
    """

    def __init__(self, path: str, faults: Iterable[str]):
        self.path = path
        self.faults = tuple(dict.fromkeys(faults))
        listed = "".join(f"\n  - {fault}" for fault in self.faults)
        super().__init__(f"{path} is not a recipe:{listed}")


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a recipe from being merged.

    Attributes:
        where: the model, or ``recipe``.
        what: what is wrong, with the tensors it is wrong with.
        remedy: what the user can do.
    """

    where: str
    what: str
    remedy: str


class RecipeError(MergeError):
    """A recipe that cannot be merged. The message lists every problem found.

    Attributes:
        problems: the same, one by one.
    """

    def __init__(self, method: str, problems: Iterable[Problem]):
        self.method = method
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        number = len(self.problems)
        yield (
            f"merge_method {self.method} cannot merge this recipe: "
            f"{number} problem{'s' if number != 1 else ''}"
        )
        for where in dict.fromkeys(problem.where for problem in self.problems):
            yield where
            for problem in self.problems:
                if problem.where == where:
                    yield f"  - {problem.what}"
                    yield f"    {problem.remedy}"


class UnplannableError(RecipeError):
    """A recipe that mergekit itself cannot plan."""


class MissingExtraError(MergeError):
    """What was asked for needs a package that is an optional extra of this one."""

    def __init__(self, what: str, package: str, extra: str):
        super().__init__(f"{what} needs {package}: pip install 'mergekit-ram[{extra}]'")


class IncompatibleMergekitError(_Picklable, RuntimeError):
    """The installed mergekit is not one that this version of mergekit-ram extends."""
