"""Quantisation: formats, round-to-nearest, AWQ and GPTQ, the AWQ checkpoint, and what it does to quality."""

from labkit.quant.awq import awq
from labkit.quant.calibrate import builtin, calibration_tokens
from labkit.quant.checkpoint import read_awq, write_awq
from labkit.quant.formats import Format, Quantised, fake, quantise
from labkit.quant.gptq import gptq
from labkit.quant.rtn import Report, rtn

__all__ = [
    "Format",
    "Quantised",
    "Report",
    "awq",
    "builtin",
    "calibration_tokens",
    "fake",
    "gptq",
    "quantise",
    "read_awq",
    "rtn",
    "write_awq",
]
