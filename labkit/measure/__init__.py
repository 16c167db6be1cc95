"""What the clock says: timing, recordings and their replay, ahead-of-time compilation and SASS statistics."""

import sys
import types

from labkit.hardware import recorded_gpu
from labkit.measure.compile import ARCHITECTURES, Compiled, compile_kernel
from labkit.measure.lock import exclusive
from labkit.measure.measure import ceilings, measure, reading, recorded, recording_path
from labkit.measure.measurement import Ceilings, Measurement, Reading
from labkit.measure.profile import ncu
from labkit.measure.recording import Recording, load
from labkit.measure.sass import SassStats
from labkit.measure.timing import Timing, time_cuda

__all__ = [
    "ARCHITECTURES",
    "Ceilings",
    "Compiled",
    "Measurement",
    "Reading",
    "Recording",
    "SassStats",
    "Timing",
    "ceilings",
    "compile_kernel",
    "exclusive",
    "load",
    "measure",
    "ncu",
    "reading",
    "recorded",
    "recorded_gpu",
    "recording_path",
    "time_cuda",
]


class _CallableModule(types.ModuleType):
    """``lab.measure(...)``: the package has the name of its main function, so the package itself answers the call."""

    __call__ = staticmethod(measure)


sys.modules[__name__].__class__ = _CallableModule
