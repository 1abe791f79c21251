"""The merge methods of ours as mergekit sees them. ``plugin.registry`` registers them and runs
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mergekit.merge_methods.base import BasePolicy, InputContract, MergeMethodSpec

from mergekit_ram.host.parameters import COMMON_PARAMETERS, RESCALING_PARAMETERS

REFERENCE_URL = "https://arxiv.org/abs/2601.13572"

RatioScope = Literal["none", "tensor", "model"]


@dataclass(frozen=True)
class RamMethod:
    """One of the RAM methods.

    Attributes:
        spec: what mergekit needs to know of it.
        ratio_scope: what the overlap-unique ratio is taken over. ``none`` for plain RAM, which has
            no ratio.
    """

    spec: MergeMethodSpec
    ratio_scope: RatioScope


def _method(name: str, pretty_name: str, ratio_scope: RatioScope) -> RamMethod:
    rescaling = () if ratio_scope == "none" else RESCALING_PARAMETERS
    return RamMethod(
        spec=MergeMethodSpec(
            name=name,
            parameters=COMMON_PARAMETERS + rescaling,
            contract=InputContract(base=BasePolicy.REQUIRED),
            pretty_name=pretty_name,
            reference_url=REFERENCE_URL,
        ),
        ratio_scope=ratio_scope,
    )


METHODS = {
    method.spec.name: method
    for method in (
        _method("ram", "Reinforced Agent Merging", "none"),
        _method("ramplus", "Reinforced Agent Merging Plus", "model"),
        _method("ramplus_tl", "Reinforced Agent Merging Plus (Tensor-Local)", "tensor"),
    )
}
