"""SmolLM2, really: AWQ against rounding on text that it was not calibrated on, in the time and memory promised."""

from __future__ import annotations

import resource
import time

import pytest

from labkit.engine import load
from labkit.quant import Format, awq, builtin, calibration_tokens, rtn
from labkit.quant.blocks import copy_of
from labkit.quant.quality import as_perplexity, compare, token_losses


@pytest.fixture(scope="module")
def smollm():
    return load("smollm2-135m", progress=None)


@pytest.mark.serial
@pytest.mark.parametrize("bits", [3, 4])
def test_awq_beats_rounding_on_text_it_has_not_seen(smollm, bits):
    model, tokenizer = smollm
    seen = calibration_tokens(builtin("prose", "calibration"), tokenizer)
    other = calibration_tokens(builtin("prose", "evaluation"), tokenizer)
    fmt, losses, start = Format(bits, 64), {}, time.perf_counter()
    scaled = copy_of(model)
    awq(scaled, fmt, seen, progress=False)
    seconds = time.perf_counter() - start
    rounded = copy_of(model)
    rtn(rounded, fmt)
    losses = {name: token_losses(m, other) for name, m in (("awq", scaled), ("rtn", rounded))}
    better = compare(losses["awq"], losses["rtn"])
    ours, theirs = (as_perplexity(losses[name]) for name in ("awq", "rtn"))
    print(f"{bits} bits: AWQ {ours} in {seconds:.0f} s, RTN {theirs}, difference {better}")
    assert better.high < 0, "better, window by window"
    if bits == 3:
        assert ours.high < theirs.low, "the intervals do not touch"
    assert seconds < 180
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 * 2**20, "KiB: the whole process stays under 3 GB"
