"""What a check of a recipe found."""

from __future__ import annotations

from pydantic import BaseModel

from mergekit_ram.errors import Problem, RecipeError


class CheckResult(BaseModel):
    """Everything that is wrong with a recipe and can be found without reading a weight.

    ``recipe`` is its file, None if it was given as data; ``method`` its merge method, or several,
    separated by commas, of a file for ``mergekit-multi``.
    """

    recipe: str | None
    method: str
    problems: list[Problem]

    @property
    def ok(self) -> bool:
        """Whether the recipe can be merged."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise what a merge would raise.

        Raises:
            RecipeError: with all problems, if there are any.
        """
        if self.problems:
            raise RecipeError(self.method, self.problems)

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)
