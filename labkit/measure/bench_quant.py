"""The rows of ``labkit bench kernels`` for weights of 4 bits: Llama-3-8B's products and larger squares, 1 row to 4096.

The goals are multiples of cuBLAS on 16 bits, which is what quantisation has to beat. Beside it stand two kernels for
the same 4 bits: tinygemm, which comes with torch, and gemlite, where that is installed.

Products of few rows are over before a launch of their own is: they are timed in a graph, over weights that L2 does not
hold.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import awq_linear
from kernels.op import Cost
from labkit.measure.bench import Row

BF16, GROUP = torch.bfloat16, 128
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (16384, 16384))
GOALS = {1: 3.2, 16: 3.0, 128: 1.8, 512: 0.95, 4096: 0.95}
FEW = 128  # rows of x beyond which tinygemm, made for few, would only cost time
GEMLITE = ((28672, 4096), (8192, 8192))  # which compiles and tries many kernels for each shape


def rows() -> list[Row]:
    return [_row(m, n, k, goal) for n, k in SHAPES for m, goal in GOALS.items()]


def _row(m: int, n: int, k: int, goal: float) -> Row:
    peers = {"cuBLAS, 16 bits": _sixteen}
    if m <= FEW:
        peers["tinygemm"] = _tinygemm
        if (n, k) in GEMLITE:
            peers["gemlite"] = _gemlite
    return Row(
        "awq_linear", f"{m}x{n}x{k}", cost(m, n, k), lambda: _Operands(m, n, k).all(),
        lambda x, packed, *_: awq_linear.awq_linear_triton(x, packed), peers,
        ceiling="read" if m <= FEW else "matmul", goal=goal, against="cuBLAS, 16 bits",
        method="graph" if m <= FEW else "events",  # as an engine runs them: one product behind the other
    )  # fmt: skip


def cost(m: int, n: int, k: int) -> Cost:
    """As ``awq_linear_cost``, for 4 bits with zero points in groups of GROUP."""
    return Cost(n * k // 2 + n * k // GROUP * 20 // 8 + 2 * m * (n + k), 2 * m * n * k)


class _Operands:
    """One matrix in every form: (x, packed, 16 bits, tinygemm's words, its scales, gemlite's layer or None)."""

    def __init__(self, m: int, n: int, k: int):
        self.m, self.n, self.k = m, n, k
        self.x = torch.randn(m, k, device="cuda", dtype=BF16)
        groups = k // GROUP
        self.codes, self.zeros = (torch.randint(16, (n, c), device="cuda", dtype=torch.uint8) for c in (k, groups))
        self.scales = ((torch.rand(n, groups, device="cuda") + 0.5) / (16 * k**0.5)).half()

    def all(self) -> tuple:
        packed = awq_linear.repack(self.codes, self.scales, self.zeros, 4, BF16)
        pairs = self.codes[:, ::2] << 4 | self.codes[:, 1::2]  # tinygemm's bytes: the even column in the upper half
        words = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        # tinygemm takes (code - 8) * scale + zero
        zeros = (8.0 - self.zeros.float()) * self.scales.float()
        both = torch.stack((self.scales.float(), zeros), -1).transpose(0, 1).contiguous().to(BF16)
        return self.x, packed, packed.dequantise(BF16), words, both, self.gemlite()

    def gemlite(self):
        if (self.n, self.k) not in GEMLITE or self.m > FEW:
            return None
        try:
            from gemlite import DType, GemLiteLinear
        except ImportError as error:
            return error
        layer = GemLiteLinear(4, GROUP, self.k, self.n, input_dtype=DType.BF16, output_dtype=DType.BF16)
        layer.pack(self.codes, self.scales.to(BF16), self.zeros.to(BF16), None)
        return layer


def _sixteen(x, packed, full, *_):
    return F.linear(x, full)


def _tinygemm(x, packed, full, words, both, *_):
    return torch.ops.aten._weight_int4pack_mm(x, words, GROUP, both)


def _gemlite(x, packed, full, words, both, layer):
    if isinstance(layer, ImportError):
        raise layer
    return layer(x)
