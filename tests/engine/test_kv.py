"""The paged cache's memory: its layout, and blocks that move."""

import pytest
import torch

from labkit.engine import ModelConfig
from labkit.engine.kv import PagedKV
from labkit.errors import LabError
from tests.engine.tiny_models import tiny_hf


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_hf(tiny_hf("llama").config.to_dict())


def numbered(config, host_blocks=0):
    """A cache whose block b holds the number b everywhere, and whose host block b holds 100 + b."""
    kv = PagedKV(config, 8, 4, host_blocks=host_blocks)
    for b in range(8):
        kv.data[:, :, b] = b
    for b in range(host_blocks):
        kv.host[b] = 100 + b
    return kv


def blocks(kv):
    assert (kv.data == kv.data[:1, :1, :, :1, :1, :1]).all(), "a block moves whole: all layers, keys and values"
    return kv.data[0, 0, :, 0, 0, 0].tolist(), kv.host[:, 0, 0, 0, 0, 0].tolist()


def test_it_is_zeros_at_first_and_as_large_as_the_config_predicts(config):
    for dtype in (torch.float32, torch.float16):
        kv = PagedKV(config, 5, 16, dtype, host_blocks=3)
        assert not kv.data.any() and not kv.host.any()
        assert kv.nbytes == 5 * PagedKV.block_bytes(config, 16, dtype) == 80 * config.kv_bytes_per_token(dtype.itemsize)
        k, v = kv.layers[1]
        assert k.shape == v.shape == (5, config.num_kv_heads, 16, config.head_dim)
        k.fill_(1), v.fill_(2)
        assert (kv.data[1, 0] == 1).all() and (kv.data[1, 1] == 2).all() and not kv.data[0].any()


def test_blocks_are_copied_as_they_were_before_the_first_copy(config):
    kv = numbered(config)
    kv.move(copies=((1, 2), (2, 3), (5, 1)))
    assert blocks(kv)[0] == [0, 5, 1, 2, 4, 5, 6, 7]


def test_swaps_come_before_and_after_copies(config):
    """Block 3 leaves before it is overwritten by the copy, and host block 1 comes in on top of the copy's source."""
    kv = numbered(config, host_blocks=3)
    kv.move(swap_out=((3, 0), (6, 2)), copies=((4, 3),), swap_in=((1, 4), (0, 7)))
    assert blocks(kv) == ([0, 1, 2, 4, 101, 5, 6, 3], [3, 101, 6])


def test_a_block_comes_back_as_it_went(config):
    kv = PagedKV(config, 6, 4, host_blocks=2)
    kv.data.normal_()
    before = kv.data.clone()
    kv.move(swap_out=((2, 1), (5, 0)))
    kv.data[:, :, (2, 5)] = float("nan")
    kv.move(swap_in=((1, 3), (0, 2)))
    assert torch.equal(kv.data[:, :, 3], before[:, :, 2]) and torch.equal(kv.data[:, :, 2], before[:, :, 5])


@pytest.mark.parametrize("size", [0, 3, 512, -16, 16.0, None])
def test_block_sizes_that_no_kernel_takes_are_refused(config, size):
    with pytest.raises(LabError, match="block_size must be a power of two from 1 to 256, got"):
        PagedKV(config, 8, size)


@pytest.mark.parametrize("counts", [dict(num_blocks=8.0), dict(num_blocks="8"), dict(host_blocks=-1)])
def test_numbers_of_blocks_are_whole(config, counts):
    with pytest.raises(LabError, match=f"{next(iter(counts))} must be a whole number of at least 0, got"):
        PagedKV(config, **(dict(num_blocks=8, block_size=4) | counts))


def test_a_cache_needs_a_block_beside_the_null_block(config):
    with pytest.raises(LabError, match=r"at least 2 blocks \(block 0 stays empty\), got 1"):
        PagedKV(config, 1, 16)
