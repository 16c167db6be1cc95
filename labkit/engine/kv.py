"""The paged KV cache's memory: blocks on the device, blocks on the host to swap to, and what moves between them.

Which block holds what is decided elsewhere (pool, scheduler). Here is only where a block's bytes are:

    data  [layers, 2, num_blocks, kv_heads, block_size, head_dim]     keys at index 0 of the second axis, values at 1
    host  [host_blocks, layers, 2, kv_heads, block_size, head_dim]    pinned where there is a GPU; a block is one run of
                                                                      bytes, which a transfer needs to be asynchronous

Both are zeros at first. Kernels do not multiply what lies past a sequence's end, but a bug that does must not meet NaN
left by whoever had the memory before. Block 0 is the null block: padding points at it, and nothing is stored there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from labkit.engine.config import ModelConfig
from labkit.engine.inputs import to_device
from labkit.errors import LabError

Pairs = Sequence[tuple[int, int]]


@contextmanager
def room_for(name: str, number: int, gib: float) -> Iterator[None]:
    """What is made in here takes ``gib`` GiB because of the setting ``name``. Raises LabError if there is no room."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has no type of its own for it on a CPU
        raise LabError(f"{name}={number} takes {gib:.1f} GiB, and there is no room for them; lower it") from error


class PagedKV:
    """Blocks of keys and values of all layers. ``layers[i]`` is (k_cache, v_cache), as the kernels take them."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        host_blocks: int = 0,
    ):
        """Raises LabError for a block size that no kernel takes, fewer than 2 blocks (block 0 is not for use), or more
        than there is room for."""
        check_block_size(block_size)
        for name, value in (("num_blocks", num_blocks), ("host_blocks", host_blocks)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise LabError(f"{name} must be a whole number of at least 0, got {value!r}")
        if num_blocks < 2:
            raise LabError(f"a paged cache needs at least 2 blocks (block 0 stays empty), got {num_blocks}")
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        gib = self.block_bytes(config, block_size, dtype) / 2**30
        with room_for("num_blocks", num_blocks, gib * num_blocks):
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self.data]
        self.num_blocks, self.block_size, self.host_blocks = num_blocks, block_size, host_blocks
        pinned = self.data.is_cuda and host_blocks > 0
        with room_for("host_blocks", host_blocks, gib * host_blocks):
            self.host = torch.zeros((host_blocks, *shape[:2], *shape[3:]), dtype=dtype, pin_memory=pinned)

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block: the keys and values of block_size tokens, all layers."""
        return block_size * config.kv_bytes_per_token(dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def move(self, swap_out: Pairs = (), copies: Pairs = (), swap_in: Pairs = ()) -> None:
        """Copy whole blocks, (source, destination) each: device to host, then inside the device, then host to device.

        Everything happens in the order of the current stream and the host does not wait: what a later step does with
        either block, on the device or through another transfer, comes after.
        """
        device = self.data.device
        if swap_out:
            source, target = zip(*swap_out, strict=True)
            moved = self.data[:, :, to_device(source, torch.int64, device)].movedim(2, 0).contiguous()
            for i, block in enumerate(target):
                self.host[block].copy_(moved[i], non_blocking=True)
        if copies:
            source, target = (to_device(c, torch.int64, device) for c in zip(*copies, strict=True))
            self.data[:, :, target] = self.data[:, :, source]  # all are read before any is written
        if swap_in:
            source, target = zip(*swap_in, strict=True)
            moved = torch.empty((len(source), *self.host.shape[1:]), dtype=self.data.dtype, device=device)
            for i, block in enumerate(source):
                moved[i].copy_(self.host[block], non_blocking=True)
            self.data[:, :, to_device(target, torch.int64, device)] = moved.movedim(0, 2)


def check_block_size(block_size: int) -> None:
    """Raises LabError unless the attention kernels take blocks of this many tokens."""
    if not isinstance(block_size, int) or not 1 <= block_size <= 256 or block_size & (block_size - 1):
        raise LabError(f"block_size must be a power of two from 1 to 256, got {block_size!r}")
