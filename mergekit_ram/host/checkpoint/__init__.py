"""What checkpoints hold, from their configs, indexes and headers alone: no weight is read.

``headers`` describes a tensor, ``files`` one file of them, ``directories`` a whole checkpoint;
``quantization`` tells weights from codes that stand for them.
"""

from mergekit_ram.host.checkpoint.directories import Checkpoint
from mergekit_ram.host.checkpoint.headers import TensorHeader, some, stored_bytes

__all__ = ["Checkpoint", "TensorHeader", "some", "stored_bytes"]
