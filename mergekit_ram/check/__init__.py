"""What is wrong with a recipe, found before a weight is read: all of it, in one error.

``recipes`` checks those of ``mergekit-yaml`` and ``mergekit-multi``, ``state_dicts`` those of
``mergekit-pytorch``, ``files`` any recipe file; ``tensors`` compares what a plan is going to load.
"""
