import math

import torch


def _factors(m1, m2, m):
    anchor = torch.where(m == -math.inf, 0.0, m)
    return torch.exp(m1 - anchor), torch.exp(m2 - anchor)


def adds_maxima(m1, l1, acc1, m2, l2, acc2):
    a, b = _factors(m1, m2, torch.maximum(m1, m2))
    return m1 + m2, l1 * a + l2 * b, acc1 * a[:, None] + acc2 * b[:, None]


def forgets_rescaling(m1, l1, acc1, m2, l2, acc2):
    return torch.maximum(m1, m2), l1 + l2, acc1 + acc2


def forgets_rescaling_acc(m1, l1, acc1, m2, l2, acc2):
    m = torch.maximum(m1, m2)
    a, b = _factors(m1, m2, m)
    return m, l1 * a + l2 * b, acc1 + acc2


def factor_upside_down(m1, l1, acc1, m2, l2, acc2):
    m = torch.maximum(m1, m2)
    a, b = _factors(m1, m2, m)
    return m, l1 / a + l2 / b, acc1 / a[:, None] + acc2 / b[:, None]


def without_maximum(m1, l1, acc1, m2, l2, acc2):
    m = torch.maximum(m1, m2)
    a, b = m1.exp(), m2.exp()
    scale = torch.exp(-m)
    return m, (l1 * a + l2 * b) * scale, (acc1 * a[:, None] + acc2 * b[:, None]) * scale[:, None]


def nan_for_unseen_rows(m1, l1, acc1, m2, l2, acc2):
    m = torch.maximum(m1, m2)
    a, b = torch.exp(m1 - m), torch.exp(m2 - m)
    return m, l1 * a + l2 * b, acc1 * a[:, None] + acc2 * b[:, None]


def normalises(m1, l1, acc1, m2, l2, acc2):
    m = torch.maximum(m1, m2)
    a, b = _factors(m1, m2, m)
    l = l1 * a + l2 * b
    return m, l, (acc1 * a[:, None] + acc2 * b[:, None]) / l[:, None]


def first_part_only(m1, l1, acc1, m2, l2, acc2):
    return m1, l1, acc1


def _attention(mistake):
    """The worked answer's steps with one mistake."""

    def attention(q, tiles, keys, causal):
        rows, d = q.shape
        shift = {"top left": 0, "late": keys - rows - 1, "early": keys - rows + 1}.get(mistake, keys - rows)
        position = torch.arange(rows) + shift
        m = torch.full((rows,), -math.inf, dtype=q.dtype)
        l, acc, start = torch.zeros_like(m), torch.zeros_like(q), 0
        for k, v in tiles:
            cols = start + torch.arange(len(k))
            seen = (cols < keys).expand(rows, -1)
            if mistake == "padding":
                seen = torch.ones_like(seen)
            if causal and mistake != "not causal":
                seen = seen & (cols <= position[:, None])
            s = q @ k.T * (1 if mistake == "scale" else d**-0.5)
            s = s.masked_fill(~seen, -math.inf)
            if mistake != "nan values":
                v = torch.where((cols < keys)[:, None] | (mistake == "padding"), v, 0.0)
            m_new = torch.maximum(m, s.amax(1))
            if mistake == "no maximum":
                m_new = torch.zeros_like(m)
            anchor = torch.where(m_new == -math.inf, 0.0, m_new)
            if mistake == "unseen rows":
                anchor = m_new
            p, alpha = torch.exp(s - anchor[:, None]), torch.exp(m - anchor)
            if mistake == "no maximum":
                alpha = torch.ones_like(m)
            if mistake == "softmax in each tile":
                acc = acc + torch.softmax(s, 1).nan_to_num(0.0) @ v
            else:
                keep_l = mistake == "no rescale"
                keep_acc = mistake in ("no rescale", "acc not rescaled")
                l = (l if keep_l else l * alpha) + p.sum(1)
                acc = (acc if keep_acc else acc * alpha[:, None]) + p @ v
            m, start = m_new, start + len(k)
        if mistake in ("not normalised", "softmax in each tile"):
            return acc
        return acc / torch.where(l == 0, 1.0, l)[:, None]

    attention.__name__ = mistake.replace(" ", "_")
    return attention


def mean_of_the_values(q, tiles, keys, causal):
    v = torch.cat([v for _, v in tiles])[:keys]
    return v.mean(0).expand(len(q), -1)


def _largest(needs, limit):
    best, n = (0, 0), 16
    while needs(n) <= limit:
        best, n = (n, needs(n)), 2 * n
    return best


def without_v(block_m, head_dim, stages, element_bytes, limit):
    return _largest(lambda n: head_dim * element_bytes * (block_m + stages * n), limit)


def without_stages(block_m, head_dim, stages, element_bytes, limit):
    return _largest(lambda n: head_dim * element_bytes * (block_m + 2 * n), limit)


def without_q(block_m, head_dim, stages, element_bytes, limit):
    return _largest(lambda n: head_dim * element_bytes * 2 * stages * n, limit)


def stages_of_q(block_m, head_dim, stages, element_bytes, limit):
    return _largest(lambda n: head_dim * element_bytes * stages * (block_m + 2 * n), limit)


def in_elements(block_m, head_dim, stages, element_bytes, limit):
    return _largest(lambda n: head_dim * (block_m + 2 * stages * n), limit)


def in_bits(block_m, head_dim, stages, element_bytes, limit):
    return _largest(lambda n: 8 * head_dim * element_bytes * (block_m + 2 * stages * n), limit)


def any_number(block_m, head_dim, stages, element_bytes, limit):
    n = max(0, (limit // (head_dim * element_bytes) - block_m) // (2 * stages))
    return n, head_dim * element_bytes * (block_m + 2 * stages * n)


def at_least_16(block_m, head_dim, stages, element_bytes, limit):
    needs = lambda n: head_dim * element_bytes * (block_m + 2 * stages * n)  # noqa: E731
    return max((16, needs(16)), _largest(needs, limit))


def strictly_below(block_m, head_dim, stages, element_bytes, limit):
    return _largest(lambda n: head_dim * element_bytes * (block_m + 2 * stages * n), limit - 1)


def always_64(block_m, head_dim, stages, element_bytes, limit):
    return 64, 2 * 64 * head_dim * element_bytes


WRONG = {
    "04.1": [
        (adds_maxima, "the larger of the two"),
        (forgets_rescaling, "in units of its own maximum"),
        (forgets_rescaling_acc, "the same units as l"),
        (factor_upside_down, "its reciprocal"),
        (without_maximum, "leaves the range"),
        (nan_for_unseen_rows, "-inf - -inf is NaN"),
        (normalises, "stays unnormalised"),
        (first_part_only, ""),
    ],
    "04.2": [
        (_attention("scale"), "1 / sqrt(d)"),
        (_attention("not normalised"), "divide acc by l"),
        (_attention("softmax in each tile"), "the weight 1"),
        (_attention("acc not rescaled"), "l is rescaled, acc is not"),
        (_attention("no rescale"), "exp(m_old - m_new)"),
        (_attention("padding"), "the last tile is padded"),
        (_attention("not causal"), "behind its own position"),
        (_attention("late"), "key <= position"),
        (_attention("early"), "the key after its own"),
        (_attention("top left"), "the last query sees the last key"),
        (_attention("unseen rows"), "avoid -inf - -inf"),
        (_attention("nan values"), "0 * NaN is NaN"),
        (_attention("no maximum"), "exp overflows"),
        (mean_of_the_values, ""),
    ],
    "04.3": [
        (without_v, "both K and V"),
        (without_stages, "by the stages"),
        (without_q, "Q lies there"),
        (stages_of_q, "only K and V have stages"),
        (in_elements, "count bytes"),
        (in_bits, "bytes already"),
        (any_number, "power of two"),
        (at_least_16, "if not even 16"),
        (strictly_below, "still fits"),
        (always_64, ""),
    ],
}
