"""The rows of ``labkit bench kernels``: shapes of Llama-3-8B and larger, the goals, and the peers beside them."""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kernels import (
    flash_attention,
    gemm,
    gemm_rms_norm,
    kv_cache,
    paged_attention,
    paged_extend,
    rms_norm,
    rope,
    silu_mul,
    transpose,
)
from kernels.op import Cost
from labkit.measure import bench_quant
from labkit.measure.bench import Row

BF16 = torch.bfloat16
EPS = 1e-6


def _randn(*shape: int, dtype=BF16) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype).normal_()


@cache
def _compiled(fn):
    return torch.compile(fn, dynamic=False)


def _liger(name: str):
    """An operator of liger-kernel, where that is installed; the import's error names it otherwise."""

    def call(*args):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        if name == "rms_norm":
            return LigerRMSNormFunction.apply(*args, EPS, 0.0, "llama", False)
        if name == "add_rms_norm":
            return LigerFusedAddRMSNormFunction.apply(*args, EPS, 0.0, "llama", False)
        return LigerSiLUMulFunction.apply(*args)

    return call


def _norms() -> list[Row]:
    rows = []
    for width in (1024, 4096, 8192, 32768):
        n = 2**28 // width
        bytes_norm, bytes_add = 4 * n * width, 8 * n * width
        rows.append(
            Row(
                "rms_norm", f"{n}x{width}", Cost(bytes_norm, 4 * n * width),
                lambda n=n, width=width: (_randn(n, width), _randn(width)),
                lambda x, w: rms_norm.rms_norm_triton(x, w, EPS),
                {
                    "F.rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS),
                    "torch.compile": lambda x, w: _compiled(rms_norm.rms_norm_reference)(x, w, EPS),
                    "liger": lambda x, w: _liger("rms_norm")(x, w),
                },
                goal=0.95,
            )
        )  # fmt: skip
        rows.append(
            Row(
                "add_rms_norm", f"{n // 2}x{width}", Cost(bytes_add // 2, 5 * n * width // 2),
                lambda n=n, width=width: (_randn(n // 2, width), _randn(n // 2, width), _randn(width)),
                lambda x, r, w: rms_norm.add_rms_norm_triton(x, r, w, EPS),
                {
                    "torch.compile": lambda x, r, w: _compiled(rms_norm.add_rms_norm_reference)(x, r, w, EPS),
                    "liger": lambda x, r, w: _liger("add_rms_norm")(x, r, w),
                },
                goal=0.95,
            )
        )  # fmt: skip
    return rows


def _elementwise() -> list[Row]:
    n, width = 16384, 14336
    tokens, heads, kv_heads, dim = 65536, 32, 8, 128
    turned = 2 * tokens * (heads + kv_heads) * dim * 2

    def rope_inputs():
        inv = 500000.0 ** -(torch.arange(0, dim, 2, device="cuda").float() / dim)
        positions = torch.arange(tokens, device="cuda") % 8192
        qkv = _randn(tokens, heads + 2 * kv_heads, dim)
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], positions, rope.rope_table(inv, 8192)

    def scatter_inputs():
        blocks = tokens // 16 + 1
        caches = (torch.zeros(blocks, kv_heads, 16, dim, device="cuda", dtype=BF16) for _ in range(2))
        slots = torch.randperm(tokens, device="cuda") + 16
        return _randn(tokens, kv_heads, dim), _randn(tokens, kv_heads, dim), *caches, slots

    side = 16384
    return [
        Row(
            "silu_mul", f"{n}x{width}", Cost(3 * n * width * 2, 5 * n * width), lambda: (_randn(n, 2 * width),),
            silu_mul.silu_mul_triton,
            {
                "torch.compile": lambda x: _compiled(silu_mul.silu_mul_reference)(x),
                "liger": lambda x: _liger("silu_mul")(*x.chunk(2, -1)),
            },
            goal=0.95,
        ),
        Row(
            "rope", f"{tokens}x({heads}+{kv_heads})x{dim}", Cost(turned, 0), rope_inputs, rope.rope_triton,
            {"torch.compile": lambda q, k, at, table: _compiled(rope.rope_reference)(q, k, at, table)}, goal=0.90,
        ),
        Row(
            "scatter", f"{tokens}x{kv_heads}x{dim}", Cost(4 * tokens * kv_heads * dim * 2 + 8 * tokens, 0),
            scatter_inputs, kv_cache.scatter_triton, {"index_put_": _index_put}, goal=0.90,
        ),
        Row(
            "transpose", f"{side}x{side}", Cost(4 * side * side, 0), lambda: (_randn(side, side),),
            transpose.transpose_triton, {"t().contiguous()": lambda x: x.t().contiguous()}, goal=0.90,
        ),
    ]  # fmt: skip


def _index_put(k, v, k_cache, v_cache, slots):
    page = k_cache.shape[2]
    for new, pages in ((k, k_cache), (v, v_cache)):
        pages.transpose(1, 2)[slots // page, slots % page] = new


def _sdpa(backend: SDPBackend, causal: bool):
    def call(q, k, v, batch):
        q, k, v = (t.view(batch, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return call


def _prefill() -> list[Row]:
    rows = []
    for dim, heads, kv_heads, goal in ((128, 32, 8, 1.0), (64, 32, 8, 0.9)):
        for length in (4096, 8192, 16384):
            batch = 16384 // length
            pairs = batch * length * (length + 1) // 2
            tokens = batch * length
            cost = Cost(2 * tokens * (2 * heads + 2 * kv_heads) * dim, 4 * dim * heads * pairs)

            def inputs(tokens=tokens, heads=heads, kv_heads=kv_heads, dim=dim, batch=batch):
                return _randn(tokens, heads, dim), _randn(tokens, kv_heads, dim), _randn(tokens, kv_heads, dim), batch

            def ours(q, k, v, batch):
                cu = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * (q.shape[0] // batch)
                return flash_attention.flash_attention(q, k, v, cu)

            rows.append(
                Row(
                    "flash_attention", f"D{dim} S{length} causal", cost, inputs, ours,
                    {
                        "cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION, True),
                        "FlashAttention-2": _sdpa(SDPBackend.FLASH_ATTENTION, True),
                    },
                    ceiling="matmul", goal=goal, against="cuDNN",
                )
            )  # fmt: skip
    return rows


def _decode() -> list[Row]:
    rows = []
    heads, kv_heads, dim, page = 32, 8, 128, 16
    for batch, context, goal, method in (
        (32, 4096, 0.90, "events"), (64, 4096, 0.90, "events"), (1, 131072, 0.75, "events"), (1, 512, None, "graph"),
    ):  # fmt: skip
        kv = 2 * batch * context * kv_heads * dim * 2

        def inputs(batch=batch, context=context):
            pages = context // page
            caches = [_randn(batch * pages + 1, kv_heads, page, dim) for _ in range(2)]
            table = (torch.randperm(batch * pages, device="cuda") + 1).int().view(batch, pages)
            return _randn(batch, heads, dim), *caches, table, torch.full((batch,), context, device="cuda").int()

        cost = Cost(kv + 4 * batch * heads * dim, 4 * batch * context * heads * dim)
        rows.append(
            Row(
                "paged_decode", f"B{batch} ctx {context}", cost, inputs, paged_attention.paged_decode,
                {
                    "cuDNN, contiguous": _contiguous(SDPBackend.CUDNN_ATTENTION),
                    "FlashAttention-2, contiguous": _contiguous(SDPBackend.FLASH_ATTENTION),
                },
                ceiling="read", goal=goal, method=method,
            )
        )  # fmt: skip
    return rows


def _contiguous(backend: SDPBackend):
    """SDPA over as many bytes of keys and values that lie side by side: what paging must not lose against."""

    def call(q, k_cache, v_cache, table, seq_lens):
        batch, (_, kv_heads, _, dim) = q.shape[0], k_cache.shape
        k, v = (c[1:].view(batch, kv_heads, -1, dim) for c in (k_cache, v_cache))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    return call


def _extend() -> list[Row]:
    """A chunk of a long prompt: new tokens that look at a paged prefix and at each other."""
    heads, kv_heads, dim, page = 32, 8, 128, 16
    rows = []
    for new, context in ((512, 8192), (2048, 8192)):
        pairs = new * (context - new) + new * (new + 1) // 2

        def inputs(new=new, context=context):
            pages = context // page
            caches = [_randn(pages + 1, kv_heads, page, dim) for _ in range(2)]
            table = (torch.randperm(pages, device="cuda") + 1).int().view(1, pages)
            lengths, bounds = (torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([context], [0, new]))
            return _randn(new, heads, dim), *caches, table, lengths, bounds

        def ours(*args, new=new):
            return paged_extend.paged_extend(*args, max_q=new)

        def contiguous(q, k_cache, v_cache, table, seq_lens, bounds, backend):
            k, v = (c[1:].view(1, kv_heads, -1, dim) for c in (k_cache, v_cache))
            mask = causal_lower_right(q.shape[0], k.shape[2])
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)

        cost = Cost(4 * (new * heads + context * kv_heads) * dim, 4 * dim * heads * pairs)
        peers = {
            "FlashAttention-2, contiguous": partial(contiguous, backend=SDPBackend.FLASH_ATTENTION),
            "efficient, contiguous": partial(contiguous, backend=SDPBackend.EFFICIENT_ATTENTION),
        }
        rows.append(Row("paged_extend", f"{new} of {context}", cost, inputs, ours, peers, ceiling="matmul"))
    return rows


def _products() -> list[Row]:
    side = 8192
    rows = [
        Row(
            "gemm", f"{level} {side}x{side}x{side}", gemm_cost(side, side, side),
            lambda: (_randn(side, side), _randn(side, side)),
            lambda a, b, level=level: gemm.gemm_triton(a, b, level), {"torch.mm": torch.mm}, ceiling="matmul",
        )
        for level in ("tiled", "pipelined", "persistent")
    ]  # fmt: skip
    for m, n, k in ((16, 6144, 4096), (2048, 6144, 4096), (8192, 6144, 4096)):
        plain = {"plain product": lambda x, w: F.linear(x, w), "norm, then product": _norm_then_product}
        rows.append(
            Row(
                "gemm_rms_norm", f"{m}x{n}x{k}", gemm_cost(m, n, k),
                lambda m=m, n=n, k=k: (_randn(m, k), _randn(n, k)),
                lambda x, w: gemm_rms_norm.gemm_rms_norm_triton(x, w, EPS), plain,
                ceiling="matmul", goal=0.95, against="plain product",
            )
        )  # fmt: skip
    return rows


def gemm_cost(m: int, n: int, k: int) -> Cost:
    return Cost(2 * (m * k + n * k + m * n), 2 * m * n * k)


def _norm_then_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], None, EPS), w)


def rows() -> list[Row]:
    """All of them, the cheap ones first."""
    return [*_norms(), *_elementwise(), *_decode(), *_extend(), *_products(), *_prefill(), *bench_quant.rows()]
