"""``measure`` times a callable where there is a GPU and replays the recorded figure where there is none."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.errors import LabError
from labkit.hardware import RECORDINGS, catalogue, is_live, recorded_gpu
from labkit.measure import recording
from labkit.measure.measurement import CEILINGS, Ceilings, Measurement, Reading
from labkit.measure.provenance import live_provenance, missing
from labkit.measure.recording import Recording
from labkit.measure.timing import METHODS, WARMUP_MS, CudaGpu, Timing, time_cuda
from labkit.paths import home, unwritable

if TYPE_CHECKING:
    from kernels.op import Cost

_ID = re.compile(r"[A-Za-z0-9][\w.+/-]*$")
_SHORT_US = 20.0  # below this the gap between two events shows, and a graph times better
_CEILING_BYTES = 2**30
_MATMUL_SIZE = 8192
_MAX_SETS = 256  # input sets that are rotated in a graph


def measure(
    id: str,
    fn: Callable,
    cost: Cost | None = None,
    *,
    inputs: Callable[[], tuple] | None = None,
    ceiling: str = "copy",
    method: str = "auto",
    flush: bool = True,
    warmup: bool | float = True,
    repeats: int | None = None,
) -> Measurement:
    """Time ``fn()``, or ``fn(*inputs())`` if ``inputs`` is given, under the name ``id``.

    Live: measured here and kept in ``$LABKIT_HOME/measurements``, and in the recording ``$LABKIT_RECORD`` if that
    names one. Otherwise replayed from the recording, and neither ``fn`` nor ``inputs`` is called, so let ``inputs``
    build what is big. ``cost``: the least work of one call. ``ceiling``: see ``Measurement``. ``method``: one of
    ``time_cuda``'s, or "auto": events, and for work below 20 us a graph, where that can be captured. ``flush``: no data
    in L2 when a call begins; in a graph this takes turns over as many input sets as exceed L2, so it needs ``inputs``.
    ``warmup``: False for none, or milliseconds.

    Raises LabError if ``fn`` raises, for an ``id`` the recording does not hold, or one it holds with another cost or
    another method than the one asked for.
    """
    _check(id, ceiling, method, cost)
    if not is_live():
        return _replayed(id, cost, ceiling, method)
    session = _session()
    try:
        warmup_ms, moved = WARMUP_MS if warmup is True else float(warmup), cost.bytes if cost else None
        timing = _time(id, fn, inputs, moved, method, flush, warmup_ms, repeats)
    except LabError as error:
        raise LabError(f"{id}: {error}") from error
    except Exception as error:
        raise LabError(f"{id}: the measured function raised {type(error).__name__}: {error}") from error
    if not all(math.isfinite(t) and t > 0 for t in timing.samples):
        raise LabError(
            f"{id}: a time was not a positive number; the GPU or its driver is in trouble, see `labkit doctor`."
        )
    result = Measurement(
        id=id,
        us=timing.us,
        us_low=timing.us_low,
        us_high=timing.us_high,
        repeats=timing.repeats,
        bytes=cost.bytes if cost else None,
        flops=cost.flops if cost else None,
        method=timing.method,
        source=f"live: {session.provenance['gpu']}",
        ceiling=ceiling,
        ceilings=session.ceilings,
    )
    _keep(session, result)
    return result


def reading(id: str, fn: Callable[[], float | list[float]], unit: str) -> Reading:
    """``fn()``, a figure or a series in ``unit`` that is no duration of a callable, under the name ``id``.

    Kept and replayed as ``measure`` does. Raises LabError if ``fn`` raises or returns something that is not finite, or
    the recording holds ``id`` in another unit.
    """
    _check(id)
    if not is_live():
        result = _recording().reading(id)
        if result.unit != unit:
            raise LabError(f"{id} was recorded in {result.unit!r}, not in {unit!r}.")
        return result
    session = _session()
    try:
        value = fn()
        values = tuple(float(v) for v in (value if isinstance(value, list | tuple) else [value]))
    except Exception as error:
        raise LabError(f"{id}: the reading raised {type(error).__name__}: {error}") from error
    if not values or not all(math.isfinite(v) for v in values):
        raise LabError(f"{id}: the reading returned {value!r}; it must be a finite number or a list of them.")
    result = Reading(id, values, unit, f"live: {session.provenance['gpu']}")
    _keep(session, result)
    return result


def recorded(id: str) -> Measurement | Reading:
    """The recorded measurement or reading ``id``, also on a machine with a GPU. Raises LabError if there is none."""
    record = _recording()
    return record.reading(id) if id in record.readings else record.measurement(id)


def ceilings() -> Ceilings:
    """What this GPU can do at best, measured once a process; without one, what the recorded GPU could."""
    return _session().ceilings if is_live() else _recording().ceilings


def recording_path(gpu: str | None = None) -> Path:
    """The recording of ``gpu``: by default of this machine's, or where there is none, of the one that is replayed."""
    if gpu is None and is_live():
        import torch

        gpu = torch.cuda.get_device_name()
    return RECORDINGS / f"{catalogue.slug(gpu or recorded_gpu())}.json"


def _check(id: str, ceiling: str = "copy", method: str = "auto", cost: object = None) -> None:
    if not isinstance(id, str) or not _ID.match(id):
        raise LabError(f"A measurement's id is a name such as '01/copy/1GiB', got {id!r}.")
    if ceiling not in CEILINGS:
        raise LabError(f"{id}: ceiling is {ceiling!r}; it must be one of {', '.join(CEILINGS)}.")
    if method not in ("auto", *METHODS):
        raise LabError(f"{id}: method is {method!r}; it must be auto or one of {', '.join(METHODS)}.")
    if cost is not None and not (hasattr(cost, "bytes") and hasattr(cost, "flops")):
        raise LabError(f"{id}: cost is {cost!r}; it must be Cost(bytes, flops) from kernels.op, or None.")


# --- replay


def _recording() -> Recording:
    path = RECORDINGS / f"{catalogue.slug(recorded_gpu())}.json"
    return _loaded(path, path.stat().st_mtime_ns if path.is_file() else 0)


@cache
def _loaded(path: Path, changed: int) -> Recording:
    return recording.load(path)


def _replayed(id: str, cost: Cost | None, ceiling: str, method: str) -> Measurement:
    result = _recording().measurement(id, ceiling)
    if cost is not None and (cost.bytes, cost.flops) != (result.bytes, result.flops):
        raise LabError(
            f"{id} was recorded for {result.bytes} bytes and {result.flops} FLOPs, but this call counts {cost.bytes} "
            f"and {cost.flops}: a changed size can be measured on a GPU only."
        )
    if method not in ("auto", result.method):
        raise LabError(
            f"{id} was recorded with method={result.method!r}, but this call asks for {method!r}: another method can "
            "be measured on a GPU only."
        )
    return result


# --- live


@dataclasses.dataclass(frozen=True)
class _Session:
    """What every measurement of this process shares."""

    provenance: dict
    ceilings: Ceilings


@cache
def _session() -> _Session:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise LabError(
            "TRITON_INTERPRET=1 is set although there is a GPU: kernels would run in the interpreter. "
            "Unset it and restart, or set LABKIT_TIER=recorded to replay."
        )
    import torch

    found, load = _measure_ceilings()
    who = live_provenance(load)
    del load  # and with it the matrices
    torch.cuda.empty_cache()
    if bad := missing(who):
        print(f"measurements are not kept: this machine does not tell its {', '.join(bad)}")
    return _Session(who, found)


def _measure_ceilings() -> tuple[Ceilings, Callable[[], None]]:
    """Copy and read of 1 GiB (less on a small GPU), and a bf16 product; and a callable that queues such products."""
    import torch

    from kernels import stream

    n_bytes = _CEILING_BYTES
    while n_bytes > 2**26 and 3 * n_bytes > torch.cuda.mem_get_info()[0]:
        n_bytes //= 2
    x = torch.empty(n_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
    out = torch.empty_like(x)
    copy_us = min(time_cuda(lambda: out.copy_(x)).us, time_cuda(lambda: stream.copy_triton(x, out=out)).us)
    read_us = time_cuda(lambda: stream.read_triton(x)).us
    x = out = None  # the product needs the room on a small GPU
    a, b = (torch.empty(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    matmul_us = time_cuda(lambda: a @ b).us

    def load() -> None:  # queued, not awaited
        for _ in range(20):
            a @ b

    return Ceilings(
        copy_gb_s=2 * n_bytes / copy_us / 1e3,
        read_gb_s=n_bytes / read_us / 1e3,
        matmul_tflop_s=2 * _MATMUL_SIZE**3 / matmul_us / 1e6,
    ), load


def _time(id, fn, inputs, moved, method, flush, warmup, repeats) -> Timing:
    call, arguments = fn, None
    if inputs is not None:
        arguments = _arguments(inputs)
        call = lambda: fn(*arguments)  # noqa: E731
    options = {"flush": flush, "warmup": warmup, "repeats": repeats}
    if method == "graph":
        return time_cuda(_rotated(fn, inputs, arguments, call, moved) if flush else call, method="graph", **options)
    if method != "auto":
        return time_cuda(call, method=method, **options)
    timing = time_cuda(call, method="events", **options)
    if timing.us >= _SHORT_US or not warmup:
        return timing
    try:
        return time_cuda(_rotated(fn, inputs, arguments, call, moved) if flush else call, method="graph", **options)
    except LabError:
        return timing


def _arguments(inputs: Callable) -> tuple:
    made = inputs()
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def _rotated(fn, inputs, first: tuple | None, call: Callable, moved: int | None) -> list[Callable]:
    """``fn`` on as many input sets as exceed twice L2: until a set's turn comes again, its data has left the cache.

    moved: bytes that a call moves, if known. Inputs may hold more than that, of which L2 would keep what is used.
    """
    import torch

    if inputs is None:
        raise LabError(
            "a graph with flush=True takes turns over several inputs: give inputs=, or flush=False for warm L2."
        )
    made = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
    used = min(made, moved or made)
    sets = math.ceil(2 * CudaGpu().l2_bytes / used) if used else _MAX_SETS + 1
    if sets > _MAX_SETS:
        raise LabError(
            f"inputs() makes {made} bytes, of which a call moves {used}: too little to exceed L2 by turns; take "
            "method='events', or flush=False."
        )
    if (sets - 1) * made > CudaGpu().free_bytes() // 2:
        raise LabError(
            f"inputs() makes {made} bytes, of which a call moves {used}: {sets} of them, as exceed L2 by turns, do not "
            "fit into half of the free memory; take method='events', or flush=False."
        )
    more = [_arguments(inputs) for _ in range(sets - 1)]
    return [call, *(lambda a=a: fn(*a) for a in more)]


def _keep(session: _Session, result: Measurement | Reading) -> None:
    """Into the recording that was asked for, which must work, and among the learner's own figures, which need not."""
    who = {**session.provenance}
    if target := os.environ.get("LABKIT_RECORD"):
        try:
            recording.write(Path(target), who, session.ceilings, result)
        except OSError as error:
            raise LabError(
                f"{result.id} cannot be recorded: LABKIT_RECORD is {target}, which cannot be written "
                f"({error.strerror or error})."
            ) from error
    if not missing(who):
        mine = home() / "measurements" / f"{catalogue.slug(who['gpu'])}.json"
        try:
            recording.write(mine, who, session.ceilings, result)
        except OSError as error:
            _say_once(f"measurements are not kept: {unwritable(mine.parent, error)}")


@cache
def _say_once(line: str) -> None:
    print(line)
