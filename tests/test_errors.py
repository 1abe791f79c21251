"""Every exception comes back from a pickle the same."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

from mergekit_ram import errors

EXAMPLES = {
    "MissingExtraError": ("a plot", "matplotlib", "plots"),
    "NonFiniteError": ([1, 0, 2],),
    "OutputOverflowError": (3, torch.float16),
    "NonFiniteWeightsError": ("a.weight", {"model": 2}),
    "OverflowedWeightsError": ("a.weight", 2, "float16"),
    "MalformedRecipeError": ("recipe.yml", ["line 3: expected a list"]),
    "UnplannableError": ("ram", [errors.Problem("recipe", "it is bad", "mend it")]),
    "RecipeError": ("ram", [errors.Problem("recipe", "it is bad", "mend it")]),
}
EXCEPTIONS = [
    found
    for name, found in vars(errors).items()
    if inspect.isclass(found)
    and issubclass(found, BaseException)
    and found.__module__ == errors.__name__
    and not name.startswith("_")
]


@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_every_exception_comes_back_from_a_pickle_the_same(kind):
    error = kind(*EXAMPLES.get(kind.__name__, ("what happened",)))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))
