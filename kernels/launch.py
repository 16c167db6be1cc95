"""What a launch must respect: the shared memory a block may have, and the widest access that strides allow."""

from __future__ import annotations

import functools
import math

import torch

# Bytes of shared memory a block can have, by compute capability (CUDA C++ Programming Guide, technical specifications:
# the maximum per multiprocessor, less the 1 KiB that the system keeps for each block).
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def arch(device: torch.device) -> int:
    """The device's compute capability as one number: 90 for sm_90. 0 for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory a block can have on ``device``; on a CPU what every architecture has."""
    if device.type != "cuda":
        return min(SHARED_BYTES.values())
    known = SHARED_BYTES.get(arch(device))
    return known or torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fits(shared_bytes: int, device: torch.device) -> bool:
    """Whether a block that needs ``shared_bytes`` of shared memory can run on ``device``."""
    return shared_bytes <= shared_limit(device)


def vector(element_size: int, *multiples: int) -> int:
    """Elements of the widest access, at most 16 bytes, that stays aligned at every sum of ``multiples`` (in elements).

    Kernels take strides and widths divided by it and multiply them back, which is how the compiler comes to know that
    they are divisible: by itself it looks only for divisibility by 16.
    """
    return math.gcd(16 // element_size, *multiples)
