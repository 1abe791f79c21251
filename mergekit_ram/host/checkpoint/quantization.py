"""Whether a checkpoint stores weights, or codes and scales that stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergekit_ram.host.checkpoint.headers import TensorHeader

# What the keys of a config that speak of quantization are called.
CONFIG_KEYS = ("quantization_config", "compression_config")

# Of what stands beside codes, or for the codes themselves, in the names that quantizers give.
_COMPANIONS = (
    ".qweight",
    ".qzeros",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight._data",
    ".weight._scale",
    ".SCB",
    ".W_q",
    "_blocks",
)
# Whose companion has to be there too: alone, the name means nothing.
_PAIRED = {"_blocks": "_scales"}
_FEW_BITS = ("F8", "F6_", "F4")
_BYTES = ("I8", "U8", "quint8", "qint8")


def quantization(tensors: Mapping[str, TensorHeader], config: Any = None) -> str | None:
    """How weights are quantized, by their dtypes and names; None if they are not.

    Args:
        config: the model's transformers config, if there is one: it may know the quantizer's name.
    """
    for name, header in tensors.items():
        found = None
        if header.dtype and header.dtype.startswith(_FEW_BITS):
            found = f"{header.dtype} weights"
        elif header.dtype in _BYTES and name.endswith("weight"):
            found = f"{header.dtype} weights ({name})"
        elif ".quant_state." in name or _is_companion(name, tensors):
            found = f"quantized weights ({name})"
        if found:
            quantizer = quantizer_of(config)
            return f"{found}, quant_method {quantizer}" if quantizer else found
    return None


def quantizer_of(config: Any) -> str | None:
    """What a config says quantized the weights, be that so or not; None if it says nothing."""
    settings = (getattr(config, key, None) for key in CONFIG_KEYS)
    found = next((s for s in settings if s is not None), None)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        found = vars(found)
    method = found.get("quant_method")
    return str(getattr(method, "value", method) or "unknown")


def _is_companion(name: str, tensors: Mapping[str, TensorHeader]) -> bool:
    suffix = next((s for s in _COMPANIONS if name.endswith(s)), None)
    if suffix in _PAIRED:
        return name.removesuffix(suffix) + _PAIRED[suffix] in tensors
    return suffix is not None
