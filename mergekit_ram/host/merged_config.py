"""The config that mergekit saves with a merged model, known before it merges."""

from __future__ import annotations

from mergekit import merge
from mergekit.architecture import ModelArchitecture
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from transformers import PretrainedConfig

from mergekit_ram.host.compatibility import require_parameters


def expected(
    config: MergeConfiguration, architecture: ModelArchitecture, options: MergeOptions
) -> PretrainedConfig:
    """The transformers config that mergekit is going to save with a merged model."""
    require_parameters(merge, "_model_out_config", ["config", "arch_info"])
    return merge._model_out_config(
        config, architecture, trust_remote_code=options.trust_remote_code
    )
