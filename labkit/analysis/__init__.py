"""What theory predicts: roofline, a model's bytes and FLOPs, coalescing, banks, occupancy."""

from labkit.analysis.banks import BankAccess, bank_access, column_access, padded, row_access, swizzled, wavefronts
from labkit.analysis.occupancy import Occupancy, Waves, occupancy, waves
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
from labkit.analysis.warps import Coalescing, coalescing, lane_efficiency, loop_efficiency, row_requests, strided

__all__ = [
    "BankAccess",
    "Coalescing",
    "ModelShape",
    "Occupancy",
    "Point",
    "Roofline",
    "StepCost",
    "Waves",
    "bank_access",
    "coalescing",
    "column_access",
    "crossover_tokens",
    "decode_step",
    "kv_bytes_per_token",
    "lane_efficiency",
    "loop_efficiency",
    "occupancy",
    "operators",
    "padded",
    "prefill_step",
    "row_access",
    "row_requests",
    "strided",
    "swizzled",
    "wavefronts",
    "waves",
]
