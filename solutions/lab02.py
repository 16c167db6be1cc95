"""Worked answers of lab 02."""

from __future__ import annotations


def sectors_of_request(stride, element_bytes):
    """Sectors of 32 bytes that a warp touches when lane i reads element ``i * stride`` of an aligned array."""
    return len({lane * stride * element_bytes // 32 for lane in range(32)})


def blocks_per_sm(registers_per_thread, shared_bytes, warps_per_block):
    """Blocks that fit an SM of sm_90 at once: the scarcest resource decides."""
    registers_per_warp = -(-registers_per_thread * 32 // 256) * 256  # rounded up to a multiple of 256
    by_registers = 65_536 // (registers_per_warp * warps_per_block)
    by_shared = 228 * 1024 // (shared_bytes + 1024)
    by_warps = 64 // warps_per_block
    return min(by_registers, by_shared, by_warps, 32)


def smallest_padding(columns, element_bytes):
    """Fewest padding elements a row with which 32 lanes read a column, one row each, in one wavefront."""
    padding = 0
    while True:
        words = {row * (columns + padding) * element_bytes // 4 for row in range(32)}
        if len({word % 32 for word in words}) == len(words):  # no bank is asked for two words
            return padding
        padding += 1
