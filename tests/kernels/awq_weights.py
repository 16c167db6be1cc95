"""Weights for the tests of the W4 kernels: random ones, and every way a matrix can be stored."""

from __future__ import annotations

import torch

from kernels.awq_linear import PackedWeight, repack

# (bits, group) of each way: 3 bits are stored as 2 and 1, or in groups too small for that as 4, as are 2.
KINDS = [(4, 128), (4, 64), (4, 32), (2, 128), (2, 64), (3, 128), (3, 64), (8, 128), (8, 64), (8, 32)]


def parts(n, k, group, bits, device="cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes [n, k], scales and zero points [n, k / group]; x . w^T is about as large as x."""
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=device)
    zeros = torch.randint(0, 1 << bits, (n, k // group), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.5) * 2.4 / (2**bits * k**0.5)
    return codes, scales.half().float(), zeros


def weight(n, k, group, dtype, bits=4, device="cpu") -> PackedWeight:
    codes, scales, zeros = parts(n, k, group, bits, device)
    return repack(codes, scales, zeros, bits, dtype)
