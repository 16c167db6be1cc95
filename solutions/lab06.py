"""Worked answers of lab 06."""

from __future__ import annotations

import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column 8 c + ORDER[i]


def weight_bytes(products, head, bits, group):
    """Bytes of weights that a decode step reads: ``products`` weights in groups, ``head`` weights of 16 bits.

    Each group of ``group`` weights has a scale of 16 bits and a zero point of ``bits`` bits beside its codes.
    """
    return products * (bits + (16 + bits) / group) / 8 + 2 * head


def quantise_groups(w, bits):
    """w: [groups, width] -> (codes [groups, width], scale [groups, 1], zero [groups, 1]), all in w's dtype.

    Each group's grid spans its values and 0; what comes back is (codes - zero) * scale. A group of zeros has scale 1.
    """
    top = 2**bits - 1
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / top
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (-low / scale).round()
    return ((w / scale).round() + zero).clamp(0, top), scale, zero


def best_scale(w, x, rounding):
    """The scale [in] of x's channels that hurts x @ w.T least once w is rounded. w: [out, in], x: [tokens, in].

    Candidates: mean |x| ** r for r = 0, 1/20, ..., 19/20, divided by the root of its largest times its smallest value.
    """
    mean, wanted, best = x.abs().mean(0), x @ w.t(), None
    for i in range(20):
        scale = mean ** (i / 20)
        scale = scale / (scale.max() * scale.min()).sqrt()
        loss = (x @ (rounding(w * scale) / scale).t() - wanted).square().mean()
        if best is None or loss < best[0]:
            best = loss, scale
    return best[1]


def pack(codes):
    """codes: uint8 below 16, [rows, columns] -> int32 [rows, columns / 8], eight codes to a word in AWQ's order."""
    eights = codes.long().unflatten(1, (-1, 8))[..., list(ORDER)]
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
