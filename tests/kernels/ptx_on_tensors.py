"""Inline PTX on the CPU: the instructions that turn codes into numbers or bytes, each on a tensor of registers.

``run(assembly, constraints, inputs)`` is for a kernel's inline assembly what the interpreter is for the kernel. Results
of 16 bits are rounded once, as the hardware's are.
"""

from __future__ import annotations

import re

import torch

KINDS = {"f16": torch.float16, "bf16": torch.bfloat16}


def _pair(word: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """int32 [...] -> fp64 [..., 2], the lower half first."""
    return word.contiguous().view(kind).unflatten(-1, (-1, 2)).double() if word.dim() else _pair(word[None], kind)[0]


def _rounded(pair: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """fp64 [..., 2] -> int32 [...]."""
    return pair.to(kind).contiguous().view(torch.int32).squeeze(-1)


def _bits(word: torch.Tensor) -> torch.Tensor:
    return word.to(torch.int64) & 0xFFFFFFFF


def _word(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def _prmt(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    a, b, selector = torch.broadcast_tensors(_bits(a), _bits(b), _bits(selector))
    octets = torch.stack([(source >> (8 * i)) & 255 for source in (a, b) for i in range(4)])
    picks = [(selector >> (4 * i)) & 15 for i in range(4)]
    assert all((pick < 8).all() for pick in picks), "sign bits are not modelled"
    return _word(sum(octets.gather(0, pick[None])[0] << (8 * i) for i, pick in enumerate(picks)))


def _step(op: str, x: list[torch.Tensor]) -> torch.Tensor:
    """The value of one instruction's destination."""
    name, *parts = op.split(".")
    kind = KINDS.get(parts[-1].removesuffix("x2"))
    if name == "shr":
        return _word(_bits(x[0]) >> int(x[1]))
    if name == "shl":
        return _word(_bits(_bits(x[0]) << int(x[1])))
    if name == "and":
        return x[0] & x[1]
    if name == "xor":
        return x[0] ^ x[1]
    if name == "lop3":
        assert int(x[3]) == 0xEA
        return x[0] & x[1] | x[2]
    if name == "prmt":
        return _prmt(*x)
    if op.startswith("cvt.rn") and parts[-1] == "f32":  # a pair: the first operand in its upper half
        return _rounded(torch.stack([x[1], x[0]], -1).double(), KINDS[parts[1].removesuffix("x2")])
    if op == "cvt.f32.f16":
        return x[0].view(torch.float16).float()
    if parts[-1] == "f32":
        return {"add": torch.add, "sub": torch.sub}[name](*x)
    assert kind and parts[0] == "rn", op
    a, b, *c = (_pair(word, kind) for word in x)
    exact = {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "fma": lambda: a * b + c[0]}
    return _rounded(exact[name](), kind)


def run(assembly: str, constraints: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, int32 for "r" and int16 for "h", of assembly with int32 inputs of shapes that broadcast.

    An output that is not marked "=&" may share an input's register, so no input may be read once it is written.
    """
    inputs = torch.broadcast_tensors(*inputs)
    kinds = constraints.split(",")
    outputs = sum(kind.startswith("=") for kind in kinds)
    assert len(kinds) == outputs + len(inputs)
    shared = {f"${i}" for i, kind in enumerate(kinds[:outputs]) if kind == "=r"}  # inputs have 32 bits, halves cannot
    written = set()
    registers = {f"${outputs + i}": t.contiguous() for i, t in enumerate(inputs)}
    declared = dict.fromkeys(f"${i}" for i in range(outputs))
    for kind, names in re.findall(r"\.reg \.(\w+) ([\w, ]+);", assembly):
        declared |= dict.fromkeys(names.split(", "), kind)

    def value(text: str, floats: bool) -> torch.Tensor:
        if text in registers:
            clobbered = shared & written and text[0] == "$" and int(text[1:]) >= outputs
            assert not clobbered, f"{text} is read when {written} are written, of which one may be the same register"
            return registers[text]
        if text.startswith("0f"):
            return torch.tensor(int(text[2:], 16)).to(torch.int32).view(torch.float32).expand(inputs[0].shape)
        return _word(torch.tensor(int(text, 0))).expand(inputs[0].shape) if floats else torch.tensor(int(text, 0))

    body = re.sub(r"\.reg [^;]+;", "", assembly).strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (line.strip() for line in body.split(";"))):
        op, rest = line.split(" ", 1)
        if op == "bar.warp.sync":
            continue
        split = re.match(r"\{(\S+), (\S+)\}, (\S+)$", rest)
        if split:
            halves = value(split[3], True).contiguous().view(torch.int16).unflatten(-1, (-1, 2))
            registers[split[1]], registers[split[2]] = halves.unbind(-1)
            continue
        to, *operands = rest.split(", ")
        operands = [
            value(text, op in ("and.b32", "xor.b32", "lop3.b32", "mov.b32") and i < 3)
            for i, text in enumerate(operands)
        ]
        written.add(to)
        assert to in declared, f"{to} is not declared"
        if op == "mov.b32":
            registers[to] = operands[0].contiguous().view(torch.float32 if declared[to] == "f32" else torch.int32)
        else:
            registers[to] = _step(op, operands)
    return [registers[f"${i}"] for i in range(outputs)]
