"""The engine's operators on a CPU: what the kernels' references compute, with fewer and larger torch calls.

The references are definitions: they go sequence by sequence and widen all they read. Here a batch is one call. A step
runs the same positions, slots and block tables through every layer, so what is derived from them is derived once:
between ``begin()`` and ``end()`` it is kept under a name, outside it is not kept at all.

A cache [num_blocks, kv_heads, block_size, head_dim] whose strides are multiples of head_dim is a matrix of rows, one a
token and head; row numbers turn paging into one index_select. What the engine does not use (windows, soft caps, a
partial rotary embedding, other strides) goes to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import awq_linear, kv_cache, paged_attention, paged_extend
from kernels import rope as rope_kernel
from labkit.engine.weights import Weights, multiply

RAGGED = 2  # a batch padded to more than this many times its tokens is cut into groups of like lengths


@dataclass
class Rows:
    """Cache rows of some sequences, each padded to the longest by repeating its last token (never by foreign memory,
    which may be NaN).

    index: int64 [seqs * kv_heads * length]; mask: bool [seqs, 1, 1, length], None if no sequence is padded.
    """

    index: torch.Tensor
    mask: torch.Tensor | None
    kv_heads: int
    length: int


class CpuOps:
    """One engine's CPU operators. Each method has the signature of the kernel of its name."""

    def __init__(self):
        self._kept: dict | None = None
        self._matrices: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # by id of the cache, which is kept

    def begin(self) -> None:
        """A step begins: until ``end``, all calls have the same positions, slots, tables and lengths."""
        self._kept = {}

    def end(self) -> None:
        self._kept = None

    def _once(self, key, make: Callable):
        if self._kept is None:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _matrix(self, cache: torch.Tensor) -> torch.Tensor | None:
        """The cache's memory as [rows, head_dim], from its first element to its last; None if it is no such matrix."""
        held = self._matrices.get(id(cache))
        if held is None or held[0] is not cache:
            held = self._matrices[id(cache)] = (cache, _matrix(cache))
        return held[1]

    # ------------------------------------------------------------------------------------------- rows of a matrix

    linear = staticmethod(F.linear)

    @staticmethod
    def awq_linear(x, weight, *, bias=None, residual=None, eps=None, gamma=None, gated=False, out=None, **_):
        if residual is None and eps is None and gamma is None and not gated and out is None:
            return multiply(x, weight, bias)
        around = dict(bias=bias, residual=residual, eps=eps, gamma=gamma, gated=gated, out=out)
        return awq_linear.OP.reference(x, weight, **around)

    @staticmethod
    def rms_norm(x, weight, eps=1e-6):
        if len(x) > 32 and x.dtype == weight.dtype == torch.float32:  # torch's own takes 4 times as long for 512 rows
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
            return (x * scale).mul_(weight)
        return F.rms_norm(x, weight.shape, weight if weight.dtype == x.dtype else weight.to(x.dtype), eps)

    @staticmethod
    def add_rms_norm(x, residual, weight, eps=1e-6):
        residual.add_(x)
        return CpuOps.rms_norm(residual, weight, eps).to(x.dtype)

    @staticmethod
    def silu_mul(x):
        gate, up = x.chunk(2, -1)
        if x.dtype == torch.float32:
            return F.silu(gate).mul_(up)
        return (F.silu(gate.float()) * up.float()).to(x.dtype)

    def rope(self, q, k, positions, table, debug=False):
        half = q.shape[2] // 2
        if table.shape[1] != q.shape[2]:
            return rope_kernel.OP.reference(q, k, positions, table, debug)

        def turns():
            cos, sin = table[positions.long()][:, None].split(half, -1)
            return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

        cos, signed_sin = self._once("rope", turns)
        for x in _side_by_side(q, k) or (q, k):
            partner = x.roll(half, -1)  # element i meets i + half; the sign is in the sine
            if x.dtype == torch.float32:
                x.mul_(cos).addcmul_(partner, signed_sin)
            else:
                x.copy_(torch.addcmul(x.float() * cos, partner.float(), signed_sin))
        return q, k

    # ------------------------------------------------------------------------------------------- the paged cache

    def scatter(self, k, v, k_cache, v_cache, slots, debug=False):
        keys, values = self._matrix(k_cache), self._matrix(v_cache)
        if keys is None or values is None or k_cache.stride() != v_cache.stride():
            return kv_cache.OP.reference(k, v, k_cache, v_cache, slots, debug)

        def targets():
            kept = (slots >= 0).nonzero()[:, 0]
            slot = slots[kept].long()
            rows = _rows(slot // k_cache.shape[2], slot % k_cache.shape[2], k_cache)
            return rows.T.contiguous(), None if len(kept) == len(slots) else kept

        rows, kept = self._once(("scatter", k_cache.stride()), targets)
        for new, cache in ((k, keys), (v, values)):
            new = new if kept is None else new[kept]
            cache.index_put_((rows,), new if new.dtype == cache.dtype else new.to(cache.dtype))

    def paged_decode(
        self, q, k_cache, v_cache, block_tables, seq_lens, *, scale=None, window=None, softcap=None, out=None, **rest
    ):
        keys, values = self._matrix(k_cache), self._matrix(v_cache)
        if window or softcap or keys is None or values is None or k_cache.stride() != v_cache.stride():
            options = dict(scale=scale, window=window, softcap=softcap, out=out)
            return paged_attention.OP.reference(q, k_cache, v_cache, block_tables, seq_lens, **options)
        groups = self._once(
            ("decode", k_cache.stride()), lambda: _groups(range(len(seq_lens)), block_tables, seq_lens, k_cache)
        )
        out = torch.empty_like(q) if out is None else out
        for seqs, rows in groups:
            if rows is None:
                out[seqs] = 0
            elif seqs is None:
                out.copy_(_attend_one(q, keys, values, rows, scale))
            else:
                out[seqs] = _attend_one(q[seqs], keys, values, rows, scale)
        return out

    def paged_extend(
        self,
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        *,
        max_q=None,
        scale=None,
        window=None,
        softcap=None,
        out=None,
        debug=False,
    ):
        keys, values = self._matrix(k_cache), self._matrix(v_cache)
        if window or softcap or keys is None or values is None or k_cache.stride() != v_cache.stride():
            options = dict(max_q=max_q, scale=scale, window=window, softcap=softcap, out=out)
            return paged_extend.OP.reference(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, **options)
        singles, several = self._once(
            ("extend", k_cache.stride()), lambda: _extend_plan(block_tables, seq_lens, cu_seqlens_q, k_cache)
        )
        out = torch.empty_like(q) if out is None else out
        for tokens, rows in singles:
            out[tokens] = 0 if rows is None else _attend_one(q[tokens], keys, values, rows, scale)
        for begin, end, blind, rows, mask in several:
            out[begin : begin + blind] = 0
            if begin + blind < end:
                out[begin + blind : end] = _attend_several(q[begin + blind : end], keys, values, rows, mask, scale)
        return out


def column_major(weights: Weights) -> None:
    """Let the layers' matrices lie in memory by columns; their shapes and values stay as they are.

    MKL's product of 2 to 16 rows reads a matrix [out, in] fastest so: SmolLM2's, in fp32 on two cores, at 8 rows in 37
    ms a step instead of 46, at 1 and from 32 rows on in the same time. In 16 bit it makes no difference. An embedding
    keeps its rows, which are looked up; a tied lm_head is one.
    """
    if weights.embedding.dtype != torch.float32:
        return
    for layer in weights.layers:
        for name in ("qkv", "attn_out", "gate_up", "down"):
            matrix = getattr(layer, name)
            if isinstance(matrix, torch.Tensor) and matrix.stride(0) != 1:
                setattr(layer, name, matrix.t().contiguous().t())
    if weights.lm_head is not weights.embedding and weights.lm_head.stride(0) != 1:
        weights.lm_head = weights.lm_head.t().contiguous().t()


def _side_by_side(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor] | None:
    """q and k as one view where k's heads follow q's in the same rows (views of a fused qkv), else None."""
    if q.stride() != k.stride() or q.data_ptr() + q.shape[1] * q.stride(1) * q.element_size() != k.data_ptr():
        return None
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return None  # neighbours by chance
    return (q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride(), q.storage_offset()),)


def _matrix(cache: torch.Tensor) -> torch.Tensor | None:
    dim, strides = cache.shape[3], cache.stride()
    if strides[3] != 1 or any(s % dim for s in strides[:3]):
        return None
    last = sum((n - 1) * s for n, s in zip(cache.shape[:3], strides[:3], strict=True))
    return cache.as_strided((last // dim + 1, dim), (dim, 1), cache.storage_offset())


def _rows(block: torch.Tensor, offset: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Row numbers of tokens at (block, offset), int64 [..., tokens] -> [..., kv_heads, tokens]."""
    of_block, of_head, of_token = (stride // cache.shape[3] for stride in cache.stride()[:3])
    return (block * of_block + offset * of_token)[..., None, :] + torch.arange(cache.shape[1])[:, None] * of_head


def _sequence_rows(seqs: list[int], block_tables, lengths: list[int], cache: torch.Tensor) -> Rows:
    """Rows of all tokens of the sequences ``seqs``, none of them empty."""
    size = cache.shape[2]
    own = torch.tensor([lengths[i] for i in seqs])
    longest = int(own.max())
    position = torch.arange(longest).minimum(own[:, None] - 1)
    block = block_tables[torch.tensor(seqs)].long().gather(1, position // size)
    index = _rows(block, position % size, cache).flatten()
    even = int(own.min()) == longest
    mask = None if even else (torch.arange(longest) < own[:, None])[:, None, None]
    return Rows(index, mask, cache.shape[1], longest)


def _groups(seqs, block_tables, seq_lens, cache) -> list[tuple[list[int] | None, Rows | None]]:
    """Sequences that are attended to in one call: (which, their rows). Which is None for all, rows None for empty ones.

    Lengths that differ much are grouped by their power of two, so that no more than twice the tokens are read.
    """
    seqs = list(seqs)
    limit = block_tables.shape[1] * cache.shape[2]  # a table says nothing about more tokens
    lengths = [min(n, limit) for n in seq_lens.tolist()]
    empty = [i for i in seqs if lengths[i] <= 0]
    full = [i for i in seqs if lengths[i] > 0]
    groups: list = [(empty, None)] if empty else []
    if not full:
        return groups
    if len(full) * max(lengths[i] for i in full) <= RAGGED * sum(lengths[i] for i in full):
        whole = len(full) == len(lengths)
        return [*groups, (None if whole else full, _sequence_rows(full, block_tables, lengths, cache))]
    for bits in sorted({lengths[i].bit_length() for i in full}):
        some = [i for i in full if lengths[i].bit_length() == bits]
        groups.append((some, _sequence_rows(some, block_tables, lengths, cache)))
    return groups


def _extend_plan(block_tables, seq_lens, cu_seqlens_q, cache):
    """(sequences of one new token as groups of token numbers and rows, the others one by one).

    The others: first token, end, how many of the first see nothing, rows, mask bool [tokens, length] (None: causal).
    """
    bounds = cu_seqlens_q.tolist()
    counts = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    ones = [i for i, n in enumerate(counts) if n == 1]
    singles = []
    for seqs, rows in _groups(ones, block_tables, seq_lens, cache):
        singles.append(([bounds[i] for i in (ones if seqs is None else seqs)], rows))
    lengths, several = seq_lens.tolist(), []
    for i, n in enumerate(counts):
        if n <= 1:
            continue
        length = max(lengths[i], 0)
        blind = max(0, n - length)  # tokens before the sequence's first see nothing
        seen = n - blind
        rows = _sequence_rows([i], block_tables, lengths, cache) if seen else None
        mask = None
        if 0 < seen < length:  # query t stands at position length - seen + t
            mask = torch.ones(seen, length, dtype=torch.bool).tril(length - seen)
        several.append((bounds[i], bounds[i + 1], blind, rows, mask))
    return singles, several


def _take(cache: torch.Tensor, rows: Rows) -> torch.Tensor:
    """cache: [rows, head_dim] -> [seqs, kv_heads, length, head_dim]."""
    return cache.index_select(0, rows.index).view(-1, rows.kv_heads, rows.length, cache.shape[1])


def _attend_one(q, keys, values, rows: Rows, scale) -> torch.Tensor:
    """One query token a sequence, [seqs, heads, head_dim]. The heads of a KV head are rows, so that K is not copied."""
    grouped = q.unflatten(1, (rows.kv_heads, -1))
    k, v = _take(keys, rows), _take(values, rows)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=rows.mask, scale=scale).flatten(1, 2)


def _attend_several(q, keys, values, rows: Rows, mask, scale) -> torch.Tensor:
    """The last tokens of one sequence, [tokens, heads, head_dim]."""
    k, v = _take(keys, rows), _take(values, rows)
    options = {"is_causal": True} if mask is None else {"attn_mask": mask}
    if q.shape[1] != rows.kv_heads:
        options["enable_gqa"] = True
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, scale=scale, **options)[0].transpose(0, 1)
