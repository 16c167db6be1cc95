"""The decoder over a packed batch and a paged cache: the same weights as ``Model``, every operator replaceable.

    residual = embedding[ids]
    each layer:  qkv = linear(rms_norm(residual));  rope(q, k);  cache <- k, v
                 residual += linear(paged attention);  residual += linear(silu_mul(linear(rms_norm(residual))))
    logits = lm_head(rms_norm(residual[rows that are asked for]))

Each addition to the residual is fused with the norm that follows it, so a layer's last addition is made by the first
norm of the next. q, k and v stay views of one fused product: one kernel turns q in place and k on its way to the cache.

A single token goes another way on a GPU (``_few_rows``): the products themselves normalise, activate and add, and a
layer is six launches. With packed weights up to 16 tokens go that way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn.attention import sdpa_kernel

from kernels.embed import embed, embed_reference
from kernels.paged_attention import decode_workspace
from kernels.paged_cache import pow2
from kernels.rope import rope_table
from kernels.rope_scatter import rope_scatter
from labkit.engine.config import ModelConfig
from labkit.engine.cpu_ops import column_major
from labkit.engine.inputs import Batch
from labkit.engine.kv import PagedKV
from labkit.engine.model import SDPA_BACKENDS, Model, inverse_frequencies, rotary_scale
from labkit.engine.ops import MOST_FUSED, by_weight, resolve_ops, with_all
from labkit.errors import LabError

MAX_GROUP, MAX_HEAD_DIM = 128, 256
# What ``with_all`` does in one kernel; with an operator of one's own among them the products stand alone.
AROUND_PRODUCTS = {"linear", "awq_linear", "rms_norm", "add_rms_norm", "silu_mul"}


class PagedModel:
    """A model that reads Batches. It has no state of its own but tables and a workspace; the cache is passed in."""

    def __init__(self, model: Model, max_model_len: int, ops: Mapping[str, Callable] | None = None):
        """Raises LabError for heads no kernel serves, a length past the model's positions, or unknown operators."""
        self.config, self.weights, self.dtype, self.device = model.config, model.weights, model.dtype, model.device
        check_heads(self.config)
        if not 1 <= max_model_len <= self.config.max_positions:
            raise LabError(
                f"max_model_len must be from 1 to the model's {self.config.max_positions} positions, "
                f"got {max_model_len}"
            )
        self.ops, self._cpu = resolve_ops(ops, self.device)
        self._linear = by_weight(self.ops)
        self._own = frozenset(ops or ())  # operators that are not the engine's
        if self._cpu is not None:
            column_major(self.weights)  # in place: a second copy would cost as much memory as the model
        c = self.config
        self._rope = rope_table(inverse_frequencies(c).to(self.device), max_model_len) * rotary_scale(c)
        cuda = self.device.type == "cuda"
        # A kernel of one's own gets what the operator's definition takes, and no settings of ours.
        ours = cuda and "paged_decode" not in self._own
        workspace = decode_workspace(c.num_heads, c.num_kv_heads, c.head_dim, self.device) if ours else None
        self._decode_options = {"workspace": workspace} if ours else {}
        self._embed = embed if cuda else embed_reference
        # Rows up to which the products of a layer do what stands around them.
        most = MOST_FUSED if self.weights.packed else 1
        self._most_fused = most if cuda and not self._own & AROUND_PRODUCTS else 0
        self._fuses_rope = cuda and not self._own & {"rope", "scatter"}

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv: PagedKV,
        tokens: torch.Tensor,
        rows: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the batch's keys and values, and return logits. Tokens read from ``tokens`` are put into ``batch.ids``.

        tokens: int32 [max_seqs], the token buffer that ``batch.source`` points into. rows: int32 [m], the tokens of the
        batch that are asked for (``batch.rows``); None: all of them. -> [m, vocab] in the model's dtype; in ``out`` if
        given.
        """
        if self._cpu is None:
            return self._forward(batch, kv, tokens, rows, out)
        self._cpu.begin()
        try:
            with sdpa_kernel(SDPA_BACKENDS):
                return self._forward(batch, kv, tokens, rows, out)
        finally:
            self._cpu.end()

    def _forward(self, batch: Batch, kv: PagedKV, tokens, rows, out) -> torch.Tensor:
        c, w, ops, eps = self.config, self.weights, self.ops, self.config.rms_eps
        linear, add_rms_norm, silu_mul = self._linear, ops["add_rms_norm"], ops["silu_mul"]
        # Fills batch.ids, so that whoever needs a step's tokens later (a repetition penalty) finds them all.
        residual = self._embed(batch.ids, batch.source, tokens, w.embedding)  # [n, hidden]
        if len(residual) <= self._most_fused and (rows is None or len(rows)):
            return self._few_rows(residual, batch, kv, rows, out)
        x = ops["rms_norm"](residual, w.layers[0].attn_norm, eps)
        for i, layer in enumerate(w.layers):
            qkv = linear(x, layer.qkv, layer.qkv_bias)
            x = linear(self._attention(layer, qkv, batch, kv.layers[i]), layer.attn_out)
            x = add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = linear(silu_mul(linear(x, layer.gate_up)), layer.down)
            if i + 1 < c.num_layers:
                x = add_rms_norm(x, residual, w.layers[i + 1].attn_norm, eps)
        if rows is not None:
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        x = add_rms_norm(x, residual, w.final_norm, eps)
        return self._head(x, out)

    def _few_rows(self, residual: torch.Tensor, batch: Batch, kv: PagedKV, rows, out) -> torch.Tensor:
        """The same for few tokens, residual [n, hidden]; in fp32 where the other way rounds between kernels."""
        w, eps = self.weights, self.config.rms_eps
        for i, layer in enumerate(w.layers):
            qkv = with_all(residual, layer.qkv, bias=layer.qkv_bias, eps=eps, gamma=layer.attn_norm)
            x = self._attention(layer, qkv, batch, kv.layers[i])
            with_all(x, layer.attn_out, residual=residual, out=residual)
            x = with_all(residual, layer.gate_up, eps=eps, gamma=layer.mlp_norm, gated=True)
            with_all(x, layer.down, residual=residual, out=residual)
        if rows is not None and len(residual) > 1:
            residual = residual.index_select(0, rows)
        if len(residual) == 1:
            return with_all(residual, w.lm_head, eps=eps, gamma=w.final_norm, out=out)
        return self._head(self.ops["rms_norm"](residual, w.final_norm, eps), out)

    def _head(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """x: [m, hidden], normalised -> logits [m, vocab], in ``out`` if given."""
        if out is None:
            return self._linear(x, self.weights.lm_head)
        if "linear" in self._own or self._cpu is not None:
            return out.copy_(self._linear(x, self.weights.lm_head))
        return self._linear(x, self.weights.lm_head, out=out)

    def _attention(self, layer, qkv: torch.Tensor, batch: Batch, cache) -> torch.Tensor:
        """qkv: [n, q_size + 2 * kv_size] -> [n, q_size]."""
        c, ops = self.config, self.ops
        heads, kv_heads = c.num_heads, c.num_kv_heads
        qkv = qkv.view(-1, heads + 2 * kv_heads, c.head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if c.qk_norm:
            q, k = ops["rms_norm"](q, layer.q_norm, c.rms_eps), ops["rms_norm"](k, layer.k_norm, c.rms_eps)
        k_cache, v_cache = cache
        if self._fuses_rope:
            q = rope_scatter(q, k, v, batch.positions, self._rope, k_cache, v_cache, batch.slots)
        else:
            q, k = ops["rope"](q, k, batch.positions, self._rope)
            ops["scatter"](k, v, k_cache, v_cache, batch.slots)
        if batch.decode:
            out = ops["paged_decode"](q, k_cache, v_cache, batch.tables, batch.seq_lens, **self._decode_options)
        else:
            out = ops["paged_extend"](
                q, k_cache, v_cache, batch.tables, batch.seq_lens, batch.bounds, max_q=batch.max_q
            )
        return out.reshape(-1, c.q_size)


def check_heads(config: ModelConfig) -> None:
    """Raises LabError if the attention kernels have no tile for the model's heads."""
    group = config.num_heads // config.num_kv_heads
    if pow2(group) > MAX_GROUP:
        raise LabError(
            f"{config.num_heads} query heads on {config.num_kv_heads} KV heads are {group} a KV head; "
            f"the attention kernels serve up to {MAX_GROUP}"
        )
    if config.head_dim > MAX_HEAD_DIM:
        raise LabError(f"head_dim {config.head_dim} is too large: the attention kernels serve up to {MAX_HEAD_DIM}")
