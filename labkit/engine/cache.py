"""The contiguous KV cache: one block of memory for every request, sized for the longest it may become.

Simple and fast for a fixed batch, wasteful for a changing one: a request that stops early has paid for ``max_len``
tokens all the same. Paging answers that.
"""

from __future__ import annotations

import torch

from labkit.engine.config import ModelConfig
from labkit.errors import LabError


class KVCache:
    """Keys and values of ``batch`` sequences that grow together.

    data: [layers, 2, batch, kv_heads, max_len, head_dim], keys at index 0 of the second axis. Zeros at first, because
    a masked-out slot still meets arithmetic in some kernels and 0 * NaN is NaN.
    length: tokens held. Slots [0, length) are valid in every layer; the model writes [length, length + n) of each
    layer during a step of n tokens, and moves ``length`` on after the last layer.
    """

    def __init__(self, config: ModelConfig, batch: int, max_len: int, dtype=torch.float32, device="cpu"):
        """Raises LabError if batch or max_len is below 1, or max_len exceeds the model's positions."""
        if batch < 1:
            raise LabError(f"a cache needs at least 1 sequence, got batch={batch}")
        if not 1 <= max_len <= config.max_positions:
            raise LabError(f"a cache of {max_len} tokens does not fit a model of 1 to {config.max_positions} positions")
        shape = (config.num_layers, 2, batch, config.num_kv_heads, max_len, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self.data]  # views made once, not in every step
        self.batch, self.max_len, self.length = batch, max_len, 0

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store n new tokens; return views of all keys and values up to and including them.

        k, v: [batch, kv_heads, n, head_dim] -> two views [batch, kv_heads, length + n, head_dim].
        """
        keys, values = self.layers[layer]
        end = self.length + k.shape[2]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, n: int) -> None:
        """Count n tokens that every layer has written."""
        self.length += n

    def room_for(self, n: int) -> None:
        """Raise LabError unless n more tokens fit."""
        if self.length + n > self.max_len:
            raise LabError(f"the cache holds {self.length} of {self.max_len} tokens and cannot take {n} more")
