"""One Llama-family decoder: Llama, Mistral, Qwen2 and Qwen3 differ in two switches of the same code.

    x = embedding[ids]
    each layer:  x += attention(rms_norm(x));  x += swiglu(rms_norm(x))
    logits = lm_head(rms_norm(x))

Between steps the only state is the KV cache, which is passed in. At batch 1 a decode step reads every weight once and
does little else, so what matters is to read them in few large products and to copy nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.engine.cache import KVCache
from labkit.engine.config import ModelConfig
from labkit.engine.weights import LayerWeights, Weights, multiply
from labkit.errors import LabError

# cuDNN plans anew for each length it has not met: a growing cache would pay some 50 ms a token (H200, torch 2.11).
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians a position for each pair of a head, fp32 [head_dim / 2], with the config's scaling applied.

    linear (Chen et al. 2023, Position Interpolation) divides all by ``factor``. llama3 (Llama 3.1's published rule)
    divides only those with wavelengths above original / low_freq_factor, keeps those below original /
    high_freq_factor, and blends in between, linearly in original / wavelength. yarn (Peng et al. 2023) blends in the
    number of the pair, between those that turn beta_fast and beta_slow times within the original context.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freqs = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    if scaling["rope_type"] == "linear":
        return freqs / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        return _yarn(config, freqs)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * freqs + (1 - keep) * freqs / scaling["factor"]


def _yarn(config: ModelConfig, freqs: torch.Tensor) -> torch.Tensor:
    """freqs with YaRN's scaling: fast pairs stay, slow ones are divided by ``factor``, a ramp lies in between."""
    scaling = config.rope_scaling
    original = scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        """The (fractional) pair that makes this many turns within the original context."""
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    high += 0.001 if high == low else 0  # a ramp of no width is a step
    divided = ((torch.arange(config.head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return (1 - divided) * freqs + divided * freqs / scaling["factor"]


def rotary_scale(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by: 1, but for YaRN, which so raises the temperature of attention."""
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]

    def stretch(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return stretch(over) / stretch(under) if over and under else stretch(1.0)


def rotary_table(positions: torch.Tensor, freqs: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 cos and signed sin, each [n, 1, head_dim], for ``apply_rotary``. Angles need fp32: 8191 has 13 bits."""
    angles = positions.float()[:, None] * freqs
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head's pairs (i, i + head_dim / 2). x: [..., n, heads, head_dim], same dtype out.

    Rolling by half a head brings each element's partner to its place, and the sign sits in ``sin``.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last n positions over all of them, with grouped KV heads.

    q: [batch, heads, n, head_dim]; k, v: [batch, kv_heads, length, head_dim], the n newest included
    -> [batch, heads, n, head_dim]
    """
    batch, heads, n, head_dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    if n == 1:  # no mask, so the query heads that share a KV head can be its rows: no key or value is repeated
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v).reshape(batch, heads, 1, head_dim)
    grouping = {"enable_gqa": True} if heads != kv_heads else {}
    if n == length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouping)
    # is_causal would align the diagonal to the top left; query i stands at position length - n + i
    mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **grouping)


class Model:
    """A decoder: its config, its weights, and ``forward``."""

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config, self.weights = config, weights
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._freqs = inverse_frequencies(config).to(self.device)
        self._rotary_scale = rotary_scale(config)

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        """An empty KV cache that fits this model's shape, dtype and device."""
        return KVCache(self.config, batch, max_len, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: KVCache | None = None, all_logits: bool = False
    ) -> torch.Tensor:
        """Logits after the n tokens ``ids``, which follow the tokens in ``cache`` and are added to it.

        ids: int64 [batch, n], all rows equally long; positions: int64 [n], shared by the rows, cache.length onwards;
        cache None: the n tokens are the whole sequence, and nothing is kept.
        -> fp32 [batch, vocab] after the last token, or [batch, n, vocab] after each if ``all_logits``.
        Raises LabError on shapes that do not fit or a full cache. Ids and positions are not range-checked here, since
        that would make the host wait for the GPU in every step; the callers check them.
        """
        batch, n = ids.shape
        if positions.shape != (n,):
            raise LabError(f"positions must be [{n}] for ids [{batch}, {n}], got {list(positions.shape)}")
        if cache is not None:
            if cache.batch != batch:
                raise LabError(f"the cache is for {cache.batch} sequences and ids has {batch} rows")
            cache.room_for(n)
        c, w = self.config, self.weights
        cos, sin = self.rotary(positions)
        hidden, eps = (c.hidden_size,), c.rms_eps
        x = F.embedding(ids.reshape(-1), w.embedding)  # [batch * n, hidden]: rows are tokens from here on
        with sdpa_kernel(SDPA_BACKENDS):
            for i, layer in enumerate(w.layers):
                y = self.attend(layer, i, F.rms_norm(x, hidden, layer.attn_norm, eps), cos, sin, cache, n)
                x += multiply(y, layer.attn_out)
                gate, up = multiply(F.rms_norm(x, hidden, layer.mlp_norm, eps), layer.gate_up).chunk(2, -1)
                x += multiply(F.silu(gate) * up, layer.down)
        if cache is not None:
            cache.advance(n)
        x = x.view(batch, n, -1) if all_logits else x.view(batch, n, -1)[:, -1]
        return F.linear(F.rms_norm(x, hidden, w.final_norm, eps), w.lm_head).float()

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int64 [n] -> what ``attend`` takes of them: fp32 cos and signed sin, [n, 1, head_dim] each."""
        return rotary_table(positions, self._freqs, self._rotary_scale)

    def attend(self, layer: LayerWeights, i: int, x, cos, sin, cache: KVCache | None, n: int) -> torch.Tensor:
        """Layer i up to what ``attn_out`` multiplies. x: [batch * n, hidden], normalised -> [batch * n, q_size]."""
        c = self.config
        rotated = c.num_heads + c.num_kv_heads  # queries and keys lie side by side and are turned together
        qkv = multiply(x, layer.qkv, layer.qkv_bias).view(-1, n, rotated + c.num_kv_heads, c.head_dim)
        qk, v = qkv[:, :, :rotated], qkv[:, :, rotated:]
        if c.qk_norm:
            q = F.rms_norm(qk[:, :, : c.num_heads], (c.head_dim,), layer.q_norm, c.rms_eps)
            k = F.rms_norm(qk[:, :, c.num_heads :], (c.head_dim,), layer.k_norm, c.rms_eps)
            qk = torch.cat((q, k), 2)
        qk = apply_rotary(qk, cos, sin).transpose(1, 2)  # [batch, heads, n, head_dim]
        q, k, v = qk[:, : c.num_heads], qk[:, c.num_heads :], v.transpose(1, 2)
        if cache is not None:
            k, v = cache.write(i, k, v)
        return attention(q, k, v).transpose(1, 2).reshape(x.shape[0], c.q_size)
