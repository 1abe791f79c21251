"""What is wrong with a recipe, found before a weight is read: all of it, in one error.

``recipes`` checks those of ``mergekit-yaml`` and ``mergekit-multi``, ``state_dicts`` those of
``mergekit-pytorch``, ``files`` any recipe file. What they find stands in ``config_files`` (a
config.json), ``models`` (a model), ``combinations`` (which models are merged with each other),
``architecture`` (whether they can be), ``tensors`` (what a plan is going to load) and ``problems``
(the rest).
"""
