"""Wrong answers of lab 06, each with a part of the hint that it must get."""

import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _bytes(name, rule):
    def weight_bytes(products, head, bits, group):
        return rule(products, head, bits, group)

    weight_bytes.__name__ = name
    return weight_bytes


def _groups(mistake):
    def quantise_groups(w, bits):
        top = 2**bits - 1
        dims = (0, 1) if mistake == "one scale" else (1,)
        low, high = w.amin(dims, keepdim=True), w.amax(dims, keepdim=True)
        if not mistake.startswith("values alone"):
            low, high = torch.clamp(low, max=0), torch.clamp(high, min=0)
        steps = 2**bits if mistake == "a step too many" else top
        scale = ((high - low) / steps).expand(len(w), 1)
        if mistake == "least scale":
            scale = scale.clamp(min=1e-5)
        elif mistake != "zeros":
            scale = scale.masked_fill(scale == 0, 1)
        zero = -low / scale
        if mistake != "no whole zero":
            zero = torch.round(zero)
        if mistake == "floor":
            codes = torch.floor(w / scale) + zero
        elif mistake == "int":
            codes = (w / scale).int() + zero
        elif mistake == "no whole zero":
            codes = torch.round(w / scale + zero)
        else:
            codes = torch.round(w / scale) + zero
        if mistake.endswith("from low"):
            codes = torch.round((w - low) / scale)
        if mistake == "values alone":
            zero = zero.clamp(0, top)
            codes = torch.round(w / scale) + zero
        if mistake not in ("no clamp", "values alone, no clamp"):
            codes = codes.clamp(0, top)
        if mistake == "nothing kept":
            codes = torch.zeros_like(w)
        return codes, scale, zero

    quantise_groups.__name__ = mistake.replace(" ", "_").replace(",", "")
    return quantise_groups


def _scale(mistake, exponents=tuple(i / 20 for i in range(20))):
    def best_scale(w, x, rounding):
        mean = x.abs().mean(0)
        if mistake == "signed":
            mean = x.mean(0)
        if mistake == "largest":
            mean = x.abs().max(0).values
        if mistake == "weights":
            mean = w.abs().mean(0)
        best = None
        for r in exponents:
            s = (x.abs() ** r).mean(0) if mistake == "power first" else mean**r
            if mistake == "no root":
                s = s / (s.max() * s.min())
            elif mistake == "largest is 1":
                s = s / s.max()
            elif mistake != "not levelled":
                s = s / torch.sqrt(s.max() * s.min())
            rounded = rounding(w * s)
            if mistake != "not divided":
                rounded = rounded / s
            error = x @ rounded.T - x @ w.T
            if mistake == "error of weights":
                error = rounded - w
            loss = (error**2).mean()
            if best is None or loss < best[0]:
                best = (loss, s, r)
        if mistake == "last":
            return s
        return best[2] if mistake == "ratio" else best[1]

    best_scale.__name__ = mistake.replace(" ", "_")
    return best_scale


def _pack(mistake):
    def pack(codes):
        if mistake == "along columns":
            eights = codes.long().reshape(-1, 8, codes.shape[1]).transpose(1, 2) if len(codes) >= 8 else codes.long()
        elif mistake == "narrow":
            eights = codes.reshape(len(codes), -1, 8)
        else:
            eights = codes.long().reshape(len(codes), -1, 8)
        words = 0
        if mistake == "along columns" and len(codes) < 8:
            return torch.zeros(len(codes) // 8, codes.shape[1], dtype=torch.int32)
        for i in range(8):
            column = {"natural": i, "inverse": ORDER.index(i)}.get(mistake, ORDER[i])
            shift = 28 - 4 * i if mistake == "from the top" else 4 * i
            words = words + (eights[..., column] << shift).to(torch.int64)
        if mistake == "long":
            return words
        if mistake == "halves":
            words = words >> 16
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    pack.__name__ = mistake.replace(" ", "_")
    return pack


WRONG = {
    "06.1": [
        (_bytes("in_bits", lambda p, h, b, g: p * (b + (16 + b) / g) + 16 * h), "those are bits"),
        (_bytes("codes_in_bits", lambda p, h, b, g: p * (b + (16 + b) / g) + 2 * h), "divide the codes by 8"),
        (_bytes("head_quantised", lambda p, h, b, g: (p + h) * (b + (16 + b) / g) / 8), "the head is not quantised"),
        (_bytes("without_head", lambda p, h, b, g: p * (b + (16 + b) / g) / 8), "the head is read"),
        (_bytes("codes_alone", lambda p, h, b, g: p * b / 8 + 2 * h), "a scale and a zero point beside"),
        (_bytes("without_zeros", lambda p, h, b, g: p * (b + 16 / g) / 8 + 2 * h), "of `bits` bits"),
        (_bytes("scale_a_weight", lambda p, h, b, g: p * (b + 16 + b) / 8 + 2 * h), "divide by its size"),
        (_bytes("zeros_of_16_bits", lambda p, h, b, g: p * (b + 32 / g) / 8 + 2 * h), "only the scale has 16 bits"),
        (_bytes("zeros_of_4_bits", lambda p, h, b, g: p * (b + 20 / g) / 8 + 2 * h), "not always have 4 bits"),
        (_bytes("sixteen_bits", lambda p, h, b, g: 2 * (p + h)), ""),
    ],
    "06.2": [
        (_groups("a step too many"), "one step less"),
        (_groups("values alone"), "on one side of 0"),
        (_groups("values alone, no clamp"), "on one side of 0"),
        (_groups("one scale"), "each row is a group"),
        (_groups("no whole zero"), "whole number"),
        (_groups("floor"), "take the nearest code"),
        (_groups("int"), "take the nearest code"),
        (_groups("no clamp"), "one code past the end"),
        (_groups("from low"), "you rounded against low"),
        (_groups("values alone, from low"), "you rounded against low"),
        (_groups("least scale"), "the least scale that you allow"),
        (_groups("zeros"), "spans nothing"),
        (_groups("nothing kept"), ""),
    ],
    "06.3": [
        (_scale("ratio"), "not the exponent"),
        (_scale("signed"), "signs cancel"),
        (_scale("largest"), "not its largest value"),
        (_scale("weights"), "not the weights"),
        (_scale("not levelled"), "largest times smallest"),
        (_scale("no root"), "largest times smallest"),
        (_scale("largest is 1"), "largest times smallest"),
        (_scale("power first"), "then the power"),
        (_scale("from 1", [i / 20 for i in range(1, 20)]), "the exponents are"),
        (_scale("up to 20", [i / 20 for i in range(21)]), "the exponents are"),
        (_scale("from 2 to 18", [i / 20 for i in range(2, 19)]), "the exponents are"),
        (_scale("from 1 to 20", [i / 20 for i in range(1, 21)]), "the exponents are"),
        (_scale("nineteenths", [i / 19 for i in range(20)]), "the exponents are"),
        (_scale("not divided"), "divide the rounded weights"),
        (_scale("error of weights"), "not of w"),
        (_scale("last"), ""),
    ],
    "06.4": [
        (_pack("natural"), "natural order"),
        (_pack("inverse"), "the other way round"),
        (_pack("from the top"), "nibble 0 is the lowest"),
        (_pack("along columns"), "along a row"),
        (_pack("narrow"), "widen the codes"),
        (_pack("long"), "a word is an int32"),
        (_pack("halves"), ""),
    ],
}
