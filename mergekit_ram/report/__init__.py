"""What was merged or inspected, in plain data: no mergekit.

``record`` collects while tensors are merged and makes a ``merge_report``; ``findings`` is what
``inspect`` and ``compare`` find, shown by ``terminal`` and ``plots``; ``checked`` is what the check
finds; ``parts`` names layers, ``frames`` makes pandas tables.
"""
