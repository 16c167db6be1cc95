"""Lab 04: two partial softmaxes merged, attention tile by tile, and the shared memory of a tile."""

from __future__ import annotations

import math

import torch

from labkit.course.exercise import Exercise, Hint, Trial
from solutions import lab04 as answers


def _near(got, guess) -> bool:
    """Tensors of one shape that agree, infinities and NaN included."""
    return got.shape == guess.shape and torch.allclose(got.double(), guess.double(), 1e-9, 1e-12, equal_nan=True)


def _random(seed, *shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- 04.1


def _partials(name, keys=(5, 7), shift=(0.0, 0.0), unseen=(), scale=1.0) -> Trial:
    """Two parts of 4 rows, each with its own keys; ``shift`` is added to a part's scores, ``unseen`` = (part, row)."""

    def make():
        inputs = {}
        for part, (n, more) in enumerate(zip(keys, shift, strict=True)):
            s, v = _random(part, 4, n) * scale + more, _random(part + 10, n, 3)
            s[[row for which, row in unseen if which == part]] = -math.inf
            m = s.amax(1)
            p = torch.exp(s - torch.where(m == -math.inf, 0.0, m)[:, None])
            inputs |= {f"m{part + 1}": m, f"l{part + 1}": p.sum(1), f"acc{part + 1}": p @ v}
        return inputs

    return Trial(name, make)


def _weights(i):
    m = torch.maximum(i["m1"], i["m2"])
    return torch.exp(i["m1"] - m), torch.exp(i["m2"] - m)


def _plain_sum(name):
    return lambda i, got, want: _near(got[("m", "l", "acc").index(name)], i[name + "1"] + i[name + "2"])


def _upside_down(i, got, want):
    a, b = _weights(i)
    return _near(got[1], i["l1"] / a + i["l2"] / b)


# --- 04.2


def _attention(name, rows, keys, block, causal=True, scale=1.0, padding=7.0) -> Trial:
    """Keys and values come in whole tiles; what is behind the last key holds ``padding``."""

    def make():
        padded = -(-keys // block) * block
        k, v = _random(1, padded, 8), _random(2, padded, 8)
        k[keys:], v[keys:] = padding, padding
        tiles = zip(k.split(block), v.split(block), strict=True)
        return {"q": _random(3, rows, 8) * scale, "tiles": tiles, "keys": keys, "causal": causal}

    return Trial(name, make)


def _scores(i, ahead=0, causal=True, top_left=False, padding=False, scale=None):
    """Masked scores [rows, padded keys] and values, with one rule replaced."""
    k, v = (torch.cat(x) for x in zip(*i["tiles"], strict=True))
    rows, keys = len(i["q"]), i["keys"]
    cols, position = torch.arange(len(k)), torch.arange(rows) + (0 if top_left else keys - rows) + ahead
    seen = torch.ones(rows, len(k), dtype=torch.bool) if padding else (cols < keys).expand(rows, -1)
    if i["causal"] and causal:
        seen = seen & (cols <= position[:, None])
    if not padding:
        v = torch.where((cols < keys)[:, None], v, 0.0)
    s = i["q"] @ k.T * (8**-0.5 if scale is None else scale)
    return s.masked_fill(~seen, -math.inf), v


def _instead(**rule):
    """The definition with one rule replaced; False where the replacement changes nothing."""

    def fits(i, got, want):
        s, v = _scores(i, **rule)
        return _near(got, (torch.softmax(s, 1) @ v).nan_to_num(0.0))

    return fits


def _walk(i, kind):
    """What comes out if the sums are not brought to the new maximum: ``kind`` "acc", "both" or "tile"."""
    tiles = list(i["tiles"])
    s, v = _scores({**i, "tiles": tiles})
    block = len(tiles[0][0])
    m, l, acc, ratios = torch.full((len(s),), -math.inf, dtype=s.dtype), 0.0, 0.0, 0.0
    for s_tile, v_tile in zip(s.split(block, 1), v.split(block), strict=True):
        m_new = torch.maximum(m, s_tile.amax(1))
        p, alpha = torch.exp(s_tile - m_new[:, None]), torch.exp(m - m_new)
        l = (l if kind == "both" else l * alpha) + p.sum(1)
        acc, m = acc + p @ v_tile, m_new
        ratios = ratios + (torch.softmax(s_tile, 1) @ v_tile).nan_to_num(0.0)
    return ratios if kind == "tile" else acc / l[:, None]


def _unnormalised(i, got, want):
    s, v = _scores(i)
    return _near(got, torch.exp(s - s.amax(1, keepdim=True)) @ v)


# --- 04.3


def _tile(name, block_m, head_dim, stages, limit, element_bytes=2) -> Trial:
    inputs = {"block_m": block_m, "head_dim": head_dim, "stages": stages, "element_bytes": element_bytes}
    return Trial(name, lambda: {**inputs, "limit": limit})


def _largest(needs):
    """The answer with another rule for the bytes that Q and tiles of n keys need."""

    def fits(i, got, want):
        best, n = (0, 0), 16
        while (needed := needs(i, n)) <= i["limit"]:
            best, n = (n, needed), 2 * n
        return tuple(got) == best

    return fits


def _row(i):
    return i["head_dim"] * i["element_bytes"]


def _bytes(i, n):
    return _row(i) * (i["block_m"] + 2 * i["stages"] * n)


EXERCISES = (
    Exercise(
        "04.1",
        "Merge two partial results",
        answers.merge,
        trials=(
            _partials("two parts"),
            _partials("the second part has far larger scores", shift=(0.0, 30.0)),
            _partials("scores around -1000", shift=(-1000.0, -1001.0)),
            _partials("scores up to 2000", scale=600.0),
            _partials("a row that saw nothing in one part", unseen=((1, 2),)),
            _partials("a row that saw nothing at all", unseen=((0, 1), (1, 1))),
        ),
        hints=(
            Hint("the new maximum is the larger of the two, row by row.", _plain_sum("m")),
            Hint(
                "each l is a sum in units of its own maximum: multiply it by exp(its m - the new m) first.",
                _plain_sum("l"),
            ),
            Hint(
                "acc is in the same units as l, and is rescaled by the same factor.",
                _plain_sum("acc"),
            ),
            Hint(
                "the factor is exp(old m - new m), never more than 1; yours is its reciprocal.",
                _upside_down,
            ),
            Hint(
                "exp without the maximum leaves the range of floating point: take differences of maxima.",
                lambda i, got, want: bool((~got[1].isfinite()).any() and want[0].isfinite().all()),
            ),
            Hint(
                "-inf - -inf is NaN: for a row that saw no key, subtract 0.",
                lambda i, got, want: bool(got[1][want[0] == -math.inf].isnan().any()),
            ),
            Hint(
                "acc stays unnormalised: divide by l once, after the last merge.",
                lambda i, got, want: _near(got[2], want[2] / want[1][:, None]),
            ),
        ),
    ),
    Exercise(
        "04.2",
        "Attention, tile by tile",
        answers.tiled_attention,
        trials=(
            _attention("one tile, every key seen", 4, 8, 8, causal=False),
            _attention("three tiles", 5, 24, 8, causal=False, scale=3.0),
            _attention("a last tile of 3 keys", 5, 19, 8, causal=False, scale=3.0),
            _attention("causal", 24, 24, 8, scale=3.0),
            _attention("causal, 5 queries behind a prefix of 14", 5, 19, 8),
            _attention("causal, more queries than keys: the first see nothing", 9, 6, 4),
            _attention("NaN behind the last key", 5, 19, 8, padding=math.nan),
            _attention("scores in the thousands", 6, 16, 4, causal=False, scale=1000.0),
        ),
        tolerance=1e-9,
        hints=(
            Hint("the scores are scaled by 1 / sqrt(d).", _instead(scale=1.0)),
            Hint("divide acc by l at the end.", _unnormalised),
            Hint(
                "a softmax in each tile gives each tile the weight 1: keep m, l and acc over all of them.",
                lambda i, got, want: _near(got, _walk(i, "tile")),
            ),
            Hint(
                "l is rescaled, acc is not: both are in units of the old maximum.",
                lambda i, got, want: _near(got, _walk(i, "acc")),
            ),
            Hint(
                "when the maximum rises, what was summed before is worth exp(m_old - m_new) of it.",
                lambda i, got, want: _near(got, _walk(i, "both")),
            ),
            Hint("the last tile is padded: keys from `keys` on must have the score -inf.", _instead(padding=True)),
            Hint("with causal=True a query sees no key behind its own position.", _instead(causal=False)),
            Hint("a query sees its own position: the mask is key <= position.", _instead(ahead=-1)),
            Hint("that mask lets a query see the key after its own.", _instead(ahead=1)),
            Hint(
                "the last query sees the last key: row r stands at position r + keys - rows.",
                _instead(top_left=True),
            ),
            Hint(
                "a row that sees no key has m = -inf and l = 0: avoid -inf - -inf and 0 / 0, and give out 0.",
                lambda i, got, want: bool(got[:3].isnan().any() and len(want) > i["keys"]),
            ),
            Hint(
                "0 * NaN is NaN: set the values behind the last key to 0.",
                lambda i, got, want: bool(got.isnan().all() and i["keys"] == 19),
            ),
            Hint(
                "exp overflows: subtract the running maximum before it.",
                lambda i, got, want: bool(got.isnan().any() and i["q"].abs().max() > 100),
            ),
        ),
    ),
    Exercise(
        "04.3",
        "The largest tile that fits",
        answers.largest_block_n,
        trials=(
            _tile("128 rows of 128 halves, 3 stages, A100", 128, 128, 3, 166_912),
            _tile("the same on an RTX 4090", 128, 128, 3, 101_376),
            _tile("the same on an H200", 128, 128, 3, 232_448),
            _tile("head size 64, 2 stages, RTX 4090", 128, 64, 2, 101_376),
            _tile("64 rows of 256, 3 stages, A100", 64, 256, 3, 166_912),
            _tile("fp8 on an H200", 256, 128, 3, 232_448, element_bytes=1),
            _tile("fp32: nothing fits", 128, 256, 2, 101_376, element_bytes=4),
            _tile("to the last byte", 64, 64, 2, 40_960),
        ),
        hints=(
            Hint(
                "both K and V lie in shared memory.", _largest(lambda i, n: _row(i) * (i["block_m"] + i["stages"] * n))
            ),
            Hint(
                "each stage holds a tile of K and a tile of V: multiply them by the stages.",
                _largest(lambda i, n: _row(i) * (i["block_m"] + 2 * n)),
            ),
            Hint("Q lies there, too.", _largest(lambda i, n: _row(i) * 2 * i["stages"] * n)),
            Hint(
                "Q is loaded once; only K and V have stages.",
                _largest(lambda i, n: _row(i) * i["stages"] * (i["block_m"] + 2 * n)),
            ),
            Hint(
                "count bytes: elements times element_bytes.",
                _largest(lambda i, n: i["head_dim"] * (i["block_m"] + 2 * i["stages"] * n)),
            ),
            Hint(
                "element_bytes are bytes already; the limit is in bytes as well.",
                _largest(lambda i, n: 8 * _row(i) * (i["block_m"] + 2 * i["stages"] * n)),
            ),
            Hint("a tile's side must be a power of two.", lambda i, got, want: got[0] & (got[0] - 1) != 0),
            Hint(
                "if not even 16 keys fit, the answer is (0, 0).",
                lambda i, got, want: want == (0, 0) and got == (16, _bytes(i, 16)),
            ),
            Hint(
                "a tile that needs exactly the limit still fits.",
                lambda i, got, want: want[1] == i["limit"] and got == (want[0] // 2, _bytes(i, want[0] // 2)),
            ),
        ),
    ),
)
