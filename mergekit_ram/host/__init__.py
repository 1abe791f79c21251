"""mergekit's terms: models, recipes, parameters, the tasks of its graph and the output."""

# First of all, so that what ``plugin`` extends is complete before anything here needs it.
import mergekit.merge_methods  # noqa: F401
