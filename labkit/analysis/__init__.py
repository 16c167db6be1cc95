"""What theory predicts: the roofline, and the bytes and FLOPs of a model's steps."""

from labkit.analysis.roofline import Point, Roofline
from labkit.analysis.traffic import (
    ModelShape,
    StepCost,
    crossover_tokens,
    decode_step,
    kv_bytes_per_token,
    operators,
    prefill_step,
)

__all__ = [
    "ModelShape",
    "Point",
    "Roofline",
    "StepCost",
    "crossover_tokens",
    "decode_step",
    "kv_bytes_per_token",
    "operators",
    "prefill_step",
]
