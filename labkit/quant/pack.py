"""Eight 4-bit codes in a 32-bit word, in the order of the AWQ checkpoint ("gemm" version).

Words run along the output: word c of a row holds columns 8 c to 8 c + 7 of [in, out]. Nibble i, bits 4 i to 4 i + 3,
holds column 8 c + ORDER[i]. The even columns lie in the low half and the odd ones in the high half, because a kernel
then gets two neighbours with one mask: w & 0x000f000f has column 0 in its lower and column 1 in its upper 16 bits.
"""

from __future__ import annotations

import torch

from labkit.errors import LabError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PER_WORD = 8


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes: integers 0 to 15, [rows, columns], columns a multiple of 8 -> int32 [rows, columns / 8].

    Raises LabError for other codes or columns: a code of 16 would change its neighbour.
    """
    if codes.dim() != 2 or codes.shape[1] % PER_WORD:
        raise LabError(f"codes are packed by eights along the second dimension, got shape {list(codes.shape)}")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= 15:
        raise LabError(f"4-bit codes run from 0 to 15, got {int(codes.min())} to {int(codes.max())}")
    nibbles = codes.to(torch.int64).view(codes.shape[0], codes.shape[1] // PER_WORD, PER_WORD)[..., list(ORDER)]
    words = (nibbles << (4 * torch.arange(PER_WORD, device=codes.device))).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # the upper half of 32 bits is negative


def unpack(words: torch.Tensor) -> torch.Tensor:
    """words: int32 [rows, columns / 8] -> uint8 [rows, columns]. Raises LabError for another dtype or rank."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise LabError(f"packed codes are an int32 matrix, got {words.dtype} {list(words.shape)}")
    shifts = 4 * torch.arange(PER_WORD, device=words.device, dtype=torch.int32)
    nibbles = (words[..., None] >> shifts) & 15
    back = [ORDER.index(column) for column in range(PER_WORD)]
    return nibbles[..., back].flatten(1).to(torch.uint8)
