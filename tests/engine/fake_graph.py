"""CUDA graphs on a CPU: torch calls are recorded with the very tensors they read and write, and done again on those.

What goes wrong in a real graph goes wrong here: a value that Python read before the capture stays what it was, a tensor
made outside and replaced later is the old one, and a step that asks for a value (``item``, ``tolist``, ``nonzero``) is
refused. Streams and timing are not simulated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.engine.graphs import CaptureFailed

ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item")


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in func.name() for name in ASKS):
            raise CaptureFailed(f"{func.name()} asks for a value")
        out = func(*args, **(kwargs or {}))
        taken = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [
            isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in taken  # neither a view nor in place
            for t in tree_leaves(out)
        ]
        self.calls.append((func, args, kwargs or {}, out, made))
        return out


class FakeCapture:
    """In the place of ``CudaCapture``. captured, replayed: how often."""

    def __init__(self):
        self.captured = self.replayed = self.warmed = 0

    def warm_up(self, step) -> None:
        self.warmed += 1
        step()

    def capture(self, step):
        self.captured += 1
        recorder = _Recorder()
        with recorder:
            step()

        def replay():
            self.replayed += 1
            for func, args, kwargs, kept, made in recorder.calls:
                fresh = func(*args, **kwargs)
                for old, new, copied in zip(tree_leaves(kept), tree_leaves(fresh), made, strict=True):
                    if copied:
                        old.copy_(new)

        return replay


def scatter(k, v, k_cache, v_cache, slots, debug=False):
    """As the kernel's definition, without asking which slots are negative: those rewrite a row of the null block."""
    size, kept = k_cache.shape[2], (slots >= 0)[:, None, None]
    slot = slots.clamp(min=0).long()
    block, offset = slot // size, slot % size
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[block, :, offset] = torch.where(kept, new, cache[block, :, offset])


def paged_decode(q, k_cache, v_cache, block_tables, seq_lens, **_):
    """As the kernel's definition, over the whole width of the tables, whatever the lengths."""
    kv_heads, dim = k_cache.shape[1], q.shape[2]
    k, v = (c[block_tables.long()].transpose(1, 2).flatten(2, 3) for c in (k_cache, v_cache))  # [seqs, heads, n, dim]
    live = torch.arange(k.shape[2]) < seq_lens[:, None]
    k, v = (torch.where(live[:, None, :, None], t, 0.0) for t in (k, v))
    s = q.unflatten(1, (kv_heads, -1)) @ k.transpose(2, 3) * dim**-0.5
    s = s.masked_fill(~live[:, None, None], float("-inf"))
    p = torch.where(live[:, None, None], torch.softmax(s, -1), 0.0)  # a row without tokens gives 0
    return (p @ v).flatten(1, 2)


def paged_extend(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, **_):
    """As the kernel's definition, each token over the whole width of its sequence's table; padding gives NaN."""
    tokens, heads, dim = q.shape
    kv_heads, at = k_cache.shape[1], torch.arange(tokens)
    seq = (at[:, None] >= cu_seqlens_q[1:]).sum(1)  # how many sequences end before each token
    padding, seq = seq >= len(seq_lens), seq.clamp(max=len(seq_lens) - 1)
    end = cu_seqlens_q[1:].gather(0, seq)
    sees = seq_lens.gather(0, seq) - (end - 1 - at)  # the last token sees all
    k, v = (c[block_tables.long()].transpose(1, 2).flatten(2, 3)[seq] for c in (k_cache, v_cache))
    live = torch.arange(k.shape[2]) < sees[:, None]
    k, v = (torch.where(live[:, None, :, None], t, 0.0) for t in (k, v))
    s = q.unflatten(1, (kv_heads, -1)) @ k.transpose(2, 3) * dim**-0.5
    p = torch.softmax(s.masked_fill(~live[:, None, None], float("-inf")), -1)
    return torch.where(padding[:, None, None], float("nan"), (p @ v).flatten(1, 2))


def rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, weight.shape, weight, eps)


#: operators of a CPU that a graph can hold
CAPTURABLE = {
    "scatter": scatter, "paged_decode": paged_decode, "paged_extend": paged_extend, "rms_norm": rms_norm,
}  # fmt: skip
