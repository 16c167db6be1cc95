def bytes_over_32(stride, element_bytes):
    return max(1, 32 * stride * element_bytes // 32)


def lines(stride, element_bytes):
    return len({lane * stride * element_bytes // 128 for lane in range(32)})


def one_each(stride, element_bytes):
    return 32


def always_five(stride, element_bytes):
    return 5


def in_warps(registers_per_thread, shared_bytes, warps_per_block):
    per_warp = -(-registers_per_thread * 32 // 256) * 256
    blocks = min(65_536 // (per_warp * warps_per_block), 228 * 1024 // (shared_bytes + 1024), 64 // warps_per_block, 32)
    return blocks * warps_per_block


def _blocks(registers_per_warp, shared_bytes, warps_per_block, most=32):
    by_registers = 65_536 // (registers_per_warp * warps_per_block)
    return min(by_registers, 228 * 1024 // max(shared_bytes, 1), 64 // warps_per_block, most)


def without_block_limit(registers_per_thread, shared_bytes, warps_per_block):
    per_warp = -(-registers_per_thread * 32 // 256) * 256
    return _blocks(per_warp, shared_bytes + 1024, warps_per_block, most=64)


def without_rounding(registers_per_thread, shared_bytes, warps_per_block):
    return _blocks(registers_per_thread * 32, shared_bytes + 1024, warps_per_block)


def without_reserve(registers_per_thread, shared_bytes, warps_per_block):
    return _blocks(-(-registers_per_thread * 32 // 256) * 256, shared_bytes, warps_per_block)


def registers_forgotten(registers_per_thread, shared_bytes, warps_per_block):
    return min(228 * 1024 // (shared_bytes + 1024), 64 // warps_per_block, 32)


def none_at_all(registers_per_thread, shared_bytes, warps_per_block):
    return 0


def words_forgotten(columns, element_bytes):
    padding = 0
    while (columns + padding) % 2 == 0:
        padding += 1
    return padding


def always_one(columns, element_bytes):
    return 1 if element_bytes == 4 else 2


def next_even(columns, element_bytes):
    return (2 if columns % 2 == 0 else 0) if element_bytes == 4 else 2


def a_whole_row(columns, element_bytes):
    return 0 if columns == 33 else 2 if element_bytes == 2 else 31


WRONG = {
    "02.1": [
        (bytes_over_32, "cannot touch more than 32"),
        (lines, "lines of 128 bytes"),
        (one_each, "count different sectors"),
        (always_five, ""),
    ],
    "02.2": [
        (in_warps, "that counts warps"),
        (without_block_limit, "at most 32 blocks"),
        (without_rounding, "units of 256"),
        (without_reserve, "beyond its own"),
        (registers_forgotten, "take the minimum"),
        (none_at_all, ""),
    ],
    "02.3": [
        (words_forgotten, "count words"),
        (always_one, "some widths need none"),
        (next_even, "must not be a multiple of 2"),
        (a_whole_row, ""),
    ],
}
