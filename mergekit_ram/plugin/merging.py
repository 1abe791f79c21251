"""``run_merge``, which ``mergekit-yaml`` and most else merge by."""

from __future__ import annotations

import functools
from types import ModuleType

from mergekit_ram.check import recipes
from mergekit_ram.cluster import driver
from mergekit_ram.errors import MergeError
from mergekit_ram.host import architectures, garbage, output, references
from mergekit_ram.host.compatibility import require_parameters
from mergekit_ram.host.finishing import add_card_section, drop_quantization
from mergekit_ram.host.methods import METHODS
from mergekit_ram.plugin.extending import is_extended, marked, once, replace_everywhere


@once
def extend(module: ModuleType) -> None:
    """Check a recipe first, have the output appear only when whole, describe agents in its card.

    Args:
        module: ``mergekit.merge``.
    """
    expected = ["merge_config", "out_path", "options", "config_source"]
    require_parameters(module, "run_merge", expected)
    run_merge = module.run_merge
    if is_extended(run_merge):
        return

    @functools.wraps(run_merge)
    def extended_run_merge(merge_config, out_path, options, config_source=None, **kwargs) -> None:
        if merge_config.merge_method not in METHODS:
            return run_merge(merge_config, out_path, options, config_source, **kwargs)
        garbage.spare_imports()
        source = config_source or references.to_yaml(merge_config)
        plain = driver.of_merge(options)
        merge_config = architectures.unwrap(merge_config, plain)
        recipes.require_mergeable(merge_config, plain, out_path)
        try:
            with (
                driver.finished_parts_kept(options),
                output.staged_output(out_path) as staging,
            ):
                run_merge(merge_config, staging, options, source, **kwargs)
                drop_quantization(staging)
                add_card_section(staging)
        except MergeError:
            raise
        except Exception:
            # Did something happen to a checkpoint meanwhile? That says more than where it was met.
            recipes.require_mergeable(merge_config, plain, out_path)
            raise

    replace_everywhere("run_merge", run_merge, marked(extended_run_merge))
