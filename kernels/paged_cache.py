"""A paged KV cache: where its tokens lie, what may be asked of it, and how a test builds one.

A cache is cut into blocks (pages) of ``block_size`` tokens; a sequence's block table names the blocks that hold its
tokens, in order. Token t of a sequence lies in block table[t // block_size], row t % block_size. Both attention kernels
over it (paged_attention, paged_extend) share this file.

    k_cache, v_cache [num_blocks, kv_heads, block_size, head_dim], any strides, last dimension contiguous
    block_tables     [seqs, max_blocks], int32; entries past a sequence's last token are never read
    seq_lens         [seqs], int32, tokens in the cache
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES

LOG2_E = tl.constexpr(1.4426950408889634)


def gather_pages(cache: torch.Tensor, table: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Tokens [first, last) of one sequence, from a cache as in the module's docstring -> [kv_heads, tokens, head_dim].

    table: [max_blocks], the sequence's block table; only entries that hold these tokens are read.
    """
    size = cache.shape[2]
    pages = cache[table[first // size : -(-last // size)].long()]
    flat = pages.transpose(0, 1).flatten(1, 2)
    return flat[:, first % size : first % size + last - first]


@triton.jit
def soften(s, SOFTCAP: tl.constexpr):
    """softcap * tanh(s / softcap) in base 2. tanh(x) = 2 sigmoid(2x) - 1 neither overflows nor cancels for large x."""
    return (SOFTCAP * LOG2_E) * (2 * tl.sigmoid(s * (2 / SOFTCAP)) - 1)


@triton.jit
def page_ids(table_ptr, tile, end, length, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Page ids of a tile's tokens: one for all where the tile lies in a page, else one a token.

    Entries past the last token are not read. ids are int64: id * stride passes 2**31 in a large cache.
    """
    if PAGE >= BLOCK_N:
        page = tl.load(table_ptr + tile * BLOCK_N // PAGE, mask=tile < end, other=0)
    else:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(table_ptr + n // PAGE, mask=n < length, other=0)
    return page.to(tl.int64)


def pow2(n: int) -> int:
    """The least power of two that is at least n and at least 16, the smallest side of a tensor-core tile."""
    return max(16, 1 << (n - 1).bit_length())


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors; on a CPU, where the kernel is interpreted, 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def check_paged(op: str, q, k_cache, v_cache, block_tables, seq_lens, out, window, softcap) -> None:
    """Raise ValueError, naming the argument, what it must be and what it is. Reads shapes only, never the device."""
    for name, t, dims, dtype in (
        ("q", q, 3, q.dtype),
        ("k_cache", k_cache, 4, q.dtype),
        ("v_cache", v_cache, 4, q.dtype),
        ("block_tables", block_tables, 2, torch.int32),
        ("seq_lens", seq_lens, 1, torch.int32),
        ("out", out, 3, q.dtype),
    ):
        if t.dim() != dims:
            raise ValueError(f"{op}: {name} must have {dims} dimensions, got shape {tuple(t.shape)}")
        if t.dtype != dtype:
            raise ValueError(f"{op}: {name} must be {dtype}{' like q' * (dims > 2)}, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{op}: {name} must be on q's device {q.device}, got {t.device}")
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"{op}: {name} must be contiguous in its last dimension, got strides {t.stride()}")
    kv_heads, size, head_dim = k_cache.shape[1:]
    for ok, name, must, got in (
        (q.dtype in DTYPES, "q", "be float32, float16 or bfloat16", q.dtype),
        (k_cache.shape == v_cache.shape, "v_cache", "have k_cache's shape", (*k_cache.shape, *v_cache.shape)),
        (q.shape[2] == head_dim, "head_dim", "be the same in q and k_cache", (q.shape[2], head_dim)),
        (0 < head_dim <= 256, "head_dim", "be from 1 to 256", head_dim),
        (kv_heads and q.shape[1] % kv_heads == 0, "heads", "be a multiple of kv_heads", (q.shape[1], kv_heads)),
        (0 < size <= 256 and size & (size - 1) == 0, "block_size", "be a power of two from 1 to 256", size),
        (block_tables.shape[0] == seq_lens.shape[0], "seq_lens", "have a row a block table", seq_lens.shape[0]),
        (out.shape == q.shape, "out", "have q's shape", tuple(out.shape)),
        (window is None or window >= 1, "window", "be None or at least 1: a token sees itself", window),
        (softcap is None or softcap > 0, "softcap", "be None or positive", softcap),
    ):
        if not ok:
            raise ValueError(f"{op}: {name} must {must}, got {got}")


def check_pages(op: str, k_cache, block_tables, seq_lens) -> None:
    """Raise ValueError for a length or a block id out of range. Waits for the GPU, so it is for debugging only."""
    size, blocks, columns = k_cache.shape[2], k_cache.shape[0], block_tables.shape[1]
    lengths, tables = seq_lens.cpu(), block_tables.cpu()
    for seq, length in enumerate(lengths.tolist()):
        if not 0 <= length <= columns * size:
            raise ValueError(
                f"{op}: seq_lens[{seq}] must be from 0 to {columns} blocks x {size} = {columns * size}, got {length}"
            )
        used = tables[seq, : -(-length // size)]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < blocks:
            wrong = int(used.max()) if int(used.max()) >= blocks else int(used.min())
            raise ValueError(f"{op}: block_tables[{seq}] must hold ids from 0 to {blocks - 1}, got {wrong}")


def paged_cache(
    lengths,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    device,
    dtype,
    generator,
    shared: int = 0,
    scale: float = 1.0,
) -> dict:
    """A cache of sequences of these lengths, as hostile as the contract allows; the arguments from k_cache to seq_lens.

    Pages lie in random order, K and V of one page side by side (so a block's stride is twice a page), three pages are
    unused. What no sequence holds is NaN: unused pages, the tails of last pages. Entries of a block table past the
    sequence's last page are far outside the cache. The first ``shared`` pages of every sequence are the same ones.
    """
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    cache = torch.full((num_blocks, 2, kv_heads, block_size, head_dim), float("nan"))
    order = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = torch.full((len(lengths), max(counts, default=0) + 2), 2**30, dtype=torch.int32)
    prefix = [next(order) for _ in range(shared)]
    for row, length in enumerate(lengths):
        for i in range(counts[row]):
            page = prefix[i] if i < shared else next(order)
            held = min(block_size, length - i * block_size)
            if i >= shared or cache[page, 0, 0, held - 1].isnan().any():
                cache[page, :, :, :held] = scale * torch.randn(2, kv_heads, held, head_dim, generator=generator)
            tables[row, i] = page
    cache = cache.to(device, dtype)
    return {
        "k_cache": cache[:, 0],
        "v_cache": cache[:, 1],
        "block_tables": tables.to(device),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
    }
