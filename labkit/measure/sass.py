"""Instruction statistics of a compiled kernel: what stands in its SASS, counted by opcode and access width.

The counts are static: an instruction in a loop counts once, however often it runs.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

# "@!P0" or "@UP1" before the opcode is its predicate; NOP only pads the end
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Za-z0-9_.]*)")

# opcode stem -> heading, in the order of the table
_GROUPS = {
    "global memory": "LDG STG LDGSTS RED REDG ATOM ATOMG UBLKCP UTMALDG UTMASTG LD ST",
    "shared memory": "LDS STS LDSM STSM ATOMS LDTM STTM",
    "local memory (spills)": "LDL STL",
    "tensor cores": "HMMA IMMA QMMA OMMA BMMA DMMA HGMMA IGMMA QGMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
    "special functions": "MUFU",
    "synchronisation": "BAR SYNCS WARPSYNC DEPBAR LDGDEPBAR ARRIVES MEMBAR FENCE WARPGROUP",
    "warp exchange": "SHFL VOTE VOTEU REDUX MATCH MOVM",
    "control": "BRA BRX CALL RET EXIT BSSY BSYNC BREAK",
}
_GROUP_OF = {stem: name for name, stems in _GROUPS.items() for stem in stems.split()}
_MEMORY = {"global memory", "shared memory", "local memory (spills)"}
_WIDTHS = {"U8", "S8", "U16", "S16", "64", "128", "256"}  # a memory opcode without one moves 32 bits
_SHAPE = re.compile(r"\d+(x\d+)+$|\d{4,5}$")  # HGMMA.64x128x16, HMMA.16816


def _matches(opcode: str, pattern: str) -> bool:
    """True if ``opcode`` has ``pattern``'s stem and all its modifiers: LDG.E.EF.128 matches LDG.E.128 and LDG."""
    stem, *modifiers = opcode.split(".")
    wanted_stem, *wanted = pattern.split(".")
    return stem == wanted_stem and all(m in modifiers for m in wanted)


def _width_key(opcode: str) -> str:
    """The opcode reduced to stem and access width (memory) or stem and shape (tensor cores)."""
    stem, *modifiers = opcode.split(".")
    group = _GROUP_OF.get(stem)
    if group in _MEMORY:
        return ".".join([stem, *(m for m in modifiers if m in _WIDTHS)][:2])
    if group == "tensor cores":
        return ".".join([stem, *(m for m in modifiers if _SHAPE.match(m.lower()))])
    if stem in ("MUFU", "BAR", "SHFL"):
        return ".".join([stem, *modifiers[:1]])
    return stem


@dataclass(frozen=True)
class SassStats:
    """``opcodes``: every instruction's full opcode (with modifiers, without predicate), in program order."""

    opcodes: tuple[str, ...]

    @classmethod
    def parse(cls, sass: str) -> SassStats:
        """Read the text that nvdisasm or ``cuobjdump -sass`` prints. Padding (NOP) is left out."""
        found = (m.group(2) for line in sass.splitlines() if (m := _INSTRUCTION.match(line)))
        return cls(tuple(op for op in found if op != "NOP"))

    def count(self, pattern: str) -> int:
        """Instructions with that stem and at least those modifiers, in any order: ``count("LDG.E.128")``."""
        return sum(n for opcode, n in self.by_opcode.items() if _matches(opcode, pattern))

    @cached_property
    def by_opcode(self) -> dict[str, int]:
        return dict(Counter(self.opcodes))

    @cached_property
    def by_width(self) -> dict[str, int]:
        """Opcode with its access width (LDG.128), matrix shape (HMMA.16816 as the assembler writes it) -> count."""
        return dict(Counter(_width_key(op) for op in self.opcodes))

    def summary(self) -> str:
        """A table that depends only on the code: group, opcode with width, count; everything else is arithmetic."""
        rows = []
        for group, stems in _GROUPS.items():
            order = {stem: i for i, stem in enumerate(stems.split())}
            keys = [k for k in self.by_width if _GROUP_OF.get(k.split(".")[0]) == group]
            for key in sorted(keys, key=lambda k: (order[k.split(".")[0]], k)):
                rows.append((group, key, self.by_width[key]))
        rest = len(self.opcodes) - sum(n for *_, n in rows)
        rows.append(("arithmetic and addresses", "", rest))
        lines, last = [f"{'group':<26}{'opcode':<22}{'count':>6}"], ""
        for group, key, n in rows:
            lines.append(f"{'' if group == last else group:<26}{key:<22}{n:>6}")
            last = group
        lines.append(f"{'all':<48}{len(self.opcodes):>6}")
        return "\n".join(lines)
