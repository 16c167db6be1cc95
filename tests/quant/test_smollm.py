"""SmolLM2, really: AWQ against rounding on text that it was not calibrated on, in the time and memory promised."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from labkit.engine import load
from labkit.quant import Format, awq, builtin, calibration_tokens, rtn
from labkit.quant.blocks import copy_of
from labkit.quant.quality import as_perplexity, compare, token_losses

# In a process of its own, whose peak memory is that of nothing else. (getrusage would not do: what it calls the peak of
# a process includes that of its parent at the fork.)
QUANTISE = """
import json, re, sys, time
from labkit.engine import load
from labkit.engine.awq_folder import save_awq
from labkit.quant import Format, awq, builtin, calibration_tokens
start = time.perf_counter()
model, tokenizer = load("smollm2-135m", progress=None)
seen = calibration_tokens(builtin("prose", "calibration"), tokenizer)
save_awq(model, awq(model, Format(4, 64), seen, progress=False), sys.argv[1])
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(json.dumps({"seconds": time.perf_counter() - start, "gib": peak / 2**20}))
"""


@pytest.fixture(scope="module")
def smollm():
    model, tokenizer = load("smollm2-135m", progress=None)
    return model, tokenizer, calibration_tokens(builtin("prose", "evaluation"), tokenizer)


def judged(better_model, model, other, bits):
    """(perplexity of the better model, of a rounded one, their difference in nats a token)."""
    rounded = copy_of(model)
    rtn(rounded, Format(bits, 64))
    ours, theirs = token_losses(better_model, other), token_losses(rounded, other)
    found = as_perplexity(ours), as_perplexity(theirs), compare(ours, theirs)
    print(f"{bits} bits: AWQ {found[0]}, RTN {found[1]}, difference {found[2]}")
    return found


@pytest.mark.serial
def test_three_bits(smollm):
    model, tokenizer, other = smollm
    scaled = copy_of(model)
    seen = calibration_tokens(builtin("prose", "calibration"), tokenizer)
    awq(scaled, Format(3, 64), seen, progress=False)
    ours, theirs, better = judged(scaled, model, other, 3)
    assert better.high < 0 and ours.high < theirs.low, "better window by window, and the intervals do not touch"


@pytest.mark.serial
def test_four_bits_through_a_checkpoint_in_three_minutes_and_three_gigabytes(smollm, tmp_path):
    model, _, other = smollm
    done = subprocess.run([sys.executable, "-c", QUANTISE, str(tmp_path / "awq")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    cost = json.loads(done.stdout.splitlines()[-1])
    print(cost)
    ours, _, better = judged(load(tmp_path / "awq", progress=None)[0], model, other, 4)
    assert better.high < 0, ours
    assert cost["seconds"] < 180 and cost["gib"] < 3, cost
