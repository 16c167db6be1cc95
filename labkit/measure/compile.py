"""Ahead-of-time compilation: a kernel's PTX, SASS, registers and occupancy on any architecture, with no GPU.

Triton brings ptxas and cuobjdump along, so a laptop can answer most questions about a kernel: are the loads 16 bytes
wide, does anything spill, how many blocks fit an SM. Compilation runs in its own process (``compile_worker``), because
the notebook's process may run Triton's interpreter. Results are kept under ``$LABKIT_HOME/compiled``.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import pickle
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from labkit.analysis.occupancy import Occupancy, occupancy
from labkit.errors import LabError
from labkit.hardware import catalogue
from labkit.measure.compiler_process import WORKER, ask
from labkit.measure.sass import SassStats
from labkit.measure.source import kernel_source, unwrap
from labkit.paths import home, replace_file

ARCHITECTURES = {
    "sm_80": "8.0",
    "sm_86": "8.6",
    "sm_89": "8.9",
    "sm_90": "9.0",
    "sm_100": "10.0",
    "sm_120": "12.0",
}
MAX_WARPS = 32  # of a block on every architecture above: 1024 threads
_TYPE = re.compile(r"\*?k?(fp16|bf16|fp32|fp64|fp8e4nv|fp8e4b15|fp8e5|[iu](1|8|16|32|64))$|\*\*|tensordesc|nvTmaDesc")


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one architecture. Registers are a thread's, ``shared_bytes`` a block's."""

    name: str
    arch: str
    num_warps: int
    num_stages: int
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    ptx: str
    ttgir: str
    sass: str

    @property
    def spills(self) -> int:
        """Bytes a thread spills: stores plus loads, as ptxas counts them (each instruction once)."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def occupancy(self) -> Occupancy:
        return occupancy(self.arch, self.registers, self.shared_bytes, self.num_warps)

    @cached_property
    def stats(self) -> SassStats:
        return SassStats.parse(self.sass)

    def count(self, pattern: str) -> int:
        """SASS instructions with that stem and at least those modifiers: ``count("LDG.E.128")``."""
        return self.stats.count(pattern)

    def __str__(self) -> str:
        return (
            f"{self.name} for {self.arch}, {self.num_warps} warps: {self.registers} registers, "
            f"{self.spills} bytes spilled, {self.shared_bytes} bytes of shared memory, occupancy {self.occupancy}"
        )


def compile_kernel(
    kernel,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object] | None = None,
    arch: str = "sm_89",
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    num_ctas: int = 1,
    maxnreg: int | None = None,
    divisible_by_16: Collection[str] | None = None,
) -> Compiled:
    """Compile ``kernel`` (under triton.jit or gluon.jit, in a file or a notebook cell) for ``arch``, without a GPU.

    ``signature``: argument -> type ("*fp16", "i32", "fp32"); ``constexprs``: argument -> value. ``divisible_by_16``
    names the pointers and integers that a launch would find to be multiples of 16; by default all of them, as with
    fresh tensors and round sizes. Raises LabError for an unknown architecture, arguments that do not fit the kernel,
    more warps than a block can have, a kernel that does not compile, or one that needs more shared memory than a block
    of ``arch`` can have.
    """
    arch = _known(arch)
    if not _is_warps(num_warps):
        raise LabError(
            f"num_warps is {num_warps!r}; a block has 1, 2, 4, 8, 16 or {MAX_WARPS} warps: a power of two, and at most "
            f"{MAX_WARPS * 32} threads."
        )
    if not isinstance(signature, Mapping):
        raise LabError(f"signature is {signature!r}; it must map arguments to types, such as {{'x_ptr': '*fp16'}}.")
    if not isinstance(constexprs, Mapping | None):
        raise LabError(f"constexprs is {constexprs!r}; it must map arguments to values, such as {{'BLOCK': 1024}}.")
    source = kernel_source(kernel)
    constexprs = {**_defaults(kernel, source.constexprs), **(constexprs or {})}
    signature = _complete(source, signature, constexprs)
    if divisible_by_16 is None:
        divisible_by_16 = [n for n, t in signature.items() if t.startswith("*") or re.fullmatch(r"[iu](32|64)", t)]
    elif unknown := set(divisible_by_16) - {n for n, t in signature.items() if t != "constexpr"}:
        raise LabError(f"{source.name}: divisible_by_16 names {', '.join(sorted(unknown))}, no runtime argument.")
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas}
    request = {
        "name": source.name,
        "module": source.module,
        "gluon": source.gluon,
        "signature": signature,
        "constexprs": _pickled(source.name, constexprs),
        "divisible": sorted(divisible_by_16),
        "capability": int(arch[3:]),
        "options": options if maxnreg is None else {**options, "maxnreg": maxnreg},
    }
    key = hashlib.sha256(
        repr((source.digest, sorted(request.items()), version("triton"), WORKER.read_bytes())).encode()
    ).hexdigest()
    kept = home() / "compiled" / f"{key}.json"
    reply = _read(kept)
    if reply is None:
        reply = ask({**request, "files": source.files, "path": sys.path})
        if error := reply.get("error"):
            where = f"\n    {error['line']}" if error["line"] else ""
            raise LabError(f"{source.name} does not compile for {arch}: {error['message']}{where}")
        with contextlib.suppress(OSError):  # the next call compiles again, and nothing else is lost
            replace_file(kept, json.dumps(reply))
    compiled = Compiled(name=source.name, arch=arch, **reply)
    room = catalogue.limits(ARCHITECTURES[arch])["shared_per_block_bytes"]
    if compiled.shared_bytes > room:
        raise LabError(
            f"{source.name} needs {compiled.shared_bytes} bytes of shared memory a block, and {arch} has {room}: "
            f"take smaller blocks, or fewer stages than {compiled.num_stages}."
        )
    return compiled


def _known(arch: str) -> str:
    """sm_90a means sm_90: Triton always compiles for the architecture's own instructions."""
    name = arch.removesuffix("a") if isinstance(arch, str) else arch
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise LabError(f"Unknown architecture {arch!r}; labkit compiles for {', '.join(ARCHITECTURES)}.")
    return name


def _is_warps(count: object) -> bool:
    whole = isinstance(count, int) and not isinstance(count, bool)
    return whole and 1 <= count <= MAX_WARPS and count & (count - 1) == 0


def _defaults(kernel, constexprs: Collection[str]) -> dict:
    parameters = inspect.signature(unwrap(kernel)).parameters
    return {n: parameters[n].default for n in constexprs if parameters[n].default is not inspect.Parameter.empty}


def _complete(source, signature: Mapping[str, str], constexprs: Mapping) -> dict[str, str]:
    """The types of all arguments in the kernel's order. Raises LabError if they do not fit the kernel."""
    wanted = f"{source.name} takes ({', '.join(source.arguments)})"
    if unknown := [n for n in (*signature, *constexprs) if n not in source.arguments]:
        raise LabError(f"{wanted}; it has no argument {', '.join(dict.fromkeys(unknown))}.")
    given = {n: t for n, t in signature.items() if t != "constexpr"}
    if both := [n for n in given if n in constexprs]:
        raise LabError(f"{source.name}: {', '.join(both)} has a type and a constexpr value; give one of the two.")
    if missing := [n for n in source.constexprs if n not in constexprs]:
        raise LabError(f"{wanted}; the constexpr {', '.join(missing)} needs a value in constexprs.")
    if missing := [n for n in source.arguments if n not in given and n not in constexprs]:
        raise LabError(
            f"{wanted}; the signature needs a type for {', '.join(missing)}, such as '*fp16', 'i32' or 'fp32'."
        )
    if bad := [f"{n}={t!r}" for n, t in given.items() if not isinstance(t, str) or not _TYPE.match(t)]:
        raise LabError(
            f"{source.name}: {', '.join(bad)} is no Triton type; write '*fp16' for a pointer, 'i32', 'fp32'."
        )
    return {n: given.get(n, "constexpr") for n in source.arguments}


def _pickled(name: str, constexprs: Mapping) -> bytes:
    try:
        return pickle.dumps(dict(constexprs), protocol=4)
    except Exception as error:
        raise LabError(f"{name}: a constexpr value cannot be carried to the compiler's process ({error}).") from error


def _read(kept: Path) -> dict | None:
    """A kept reply of the compiler, or None if there is none or the file holds something else."""
    try:
        reply = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kinds = {f.name: {"int": int, "str": str}[f.type] for f in fields(Compiled) if f.name not in ("name", "arch")}
    whole = isinstance(reply, dict) and set(reply) == set(kinds)
    return reply if whole and all(isinstance(reply[name], kind) for name, kind in kinds.items()) else None
