"""A kernel as source text that compiles in another process, wherever the kernel was defined.

With TRITON_INTERPRET=1 ``triton.jit`` makes interpreted functions, which hold no compilable form, and a kernel in a
notebook cell lies in no module that another process could import. So the text of the kernel and of everything it uses
is gathered: helper functions, constants, imports. One module is written for each module they come from, because two
modules may use one name for two things.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import pickle
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType

from labkit.errors import LabError


@dataclass(frozen=True)
class KernelSource:
    """``files``: module name -> text. ``module`` holds the kernel ``name``, whose arguments are ``arguments``."""

    name: str
    module: str
    arguments: tuple[str, ...]
    constexprs: tuple[str, ...]
    gluon: bool
    files: dict[str, str]
    imported: dict[str, str]  # modules that are imported as they are -> hash of their file

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.name, self.module, self.files, self.imported)).encode()).hexdigest()


def unwrap(kernel) -> FunctionType:
    """The plain function under triton.jit, the interpreter, autotune and heuristics."""
    seen = kernel
    while not isinstance(seen, FunctionType):
        if not hasattr(seen, "fn"):
            raise LabError(
                f"compile_kernel: got a {type(kernel).__name__}, needs a Triton kernel: a function under @triton.jit."
            )
        seen = seen.fn
    return seen


def _kind(value) -> str | None:
    """The decorator that made ``value``, or None if it is no kernel function."""
    name = type(value).__name__
    if name == "GluonJITFunction":
        return "gluon"
    if name in ("JITFunction", "InterpretedFunction", "Autotuner", "Heuristics"):
        return _kind(value.fn) if name in ("Autotuner", "Heuristics") else "triton"
    return "constexpr" if name == "ConstexprFunction" else None


def kernel_source(kernel) -> KernelSource:
    """Gather ``kernel`` (under triton.jit or gluon.jit) and what it uses.

    Raises LabError if its source text cannot be found, or it uses an object that cannot be carried over.
    """
    function, kind = unwrap(kernel), _kind(kernel) or "triton"
    gatherer = _Gatherer()
    module = gatherer.add(function, kind)
    parameters = inspect.signature(function).parameters.values()
    return KernelSource(
        name=function.__name__,
        module=module,
        arguments=tuple(p.name for p in parameters),
        constexprs=tuple(p.name for p in parameters if "constexpr" in str(p.annotation)),
        gluon=kind == "gluon",
        files={name: part.text() for name, part in gatherer.parts.items()},
        imported=gatherer.imported,
    )


@dataclass
class _Part:
    """One generated module."""

    lines: dict[str, str] = field(default_factory=dict)  # name -> statement that binds it
    functions: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        head = "from __future__ import annotations\n\nimport triton\nfrom triton.experimental import gluon\n"
        return "\n".join([head, *self.lines.values(), "", *self.functions.values()])


_DECORATORS = {"triton": "triton.jit", "gluon": "gluon.jit", "constexpr": "triton.constexpr_function"}


class _Gatherer:
    def __init__(self):
        self.parts: dict[str, _Part] = {}
        self.imported: dict[str, str] = {}

    def add(self, function: FunctionType, kind: str) -> str:
        """Put ``function`` and what it uses into its generated module, whose name is returned."""
        name = "labkit_kernel_" + hashlib.sha256(function.__module__.encode()).hexdigest()[:12]
        part = self.parts.setdefault(name, _Part())
        if function.__name__ == "<lambda>":
            raise LabError("compile_kernel: got a lambda, needs a Triton kernel: a function under @triton.jit.")
        if function.__name__ in part.functions:
            return name
        try:
            node_lines = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError) as error:
            raise LabError(
                f"compile_kernel: the source text of {function.__name__} is not available ({error}); "
                "define it in a file or a notebook cell."
            ) from error
        node = next(n for n in ast.walk(ast.parse(node_lines)) if isinstance(n, ast.FunctionDef))
        body = "\n".join(node_lines.splitlines()[node.lineno - 1 : node.end_lineno])
        noinline = any(
            k.arg == "noinline" and getattr(k.value, "value", False)
            for d in node.decorator_list
            if isinstance(d, ast.Call)
            for k in d.keywords
        )
        decorator = _DECORATORS[kind] + ("(noinline=True)" if noinline else "")
        part.functions[function.__name__] = ""  # a function that calls itself ends here
        scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        for used in sorted(_free_names(node)):
            if used in scope:
                self._bind(part, name, used, scope[used], function)
        part.functions[function.__name__] = f"@{decorator}\n{body}\n"
        return name

    def _bind(self, part: _Part, part_name: str, name: str, value, user: FunctionType) -> None:
        """Make ``name`` mean ``value`` in ``part``."""
        if name in part.lines or name in part.functions:
            return
        kind = _kind(value)
        module = getattr(unwrap(value) if kind else value, "__module__", None) or ""
        annotated = "constexpr" in str(user.__globals__.get("__annotations__", {}).get(name, ""))
        if isinstance(value, ModuleType):
            self._note(value.__name__)
            part.lines[name] = f"import {value.__name__} as {name}"
        elif kind and not module.startswith("triton."):
            function = unwrap(value)
            home = self.add(function, kind)
            if home != part_name or function.__name__ != name:
                part.lines[name] = f"from {home} import {function.__name__} as {name}"
        elif kind or (isinstance(value, type | FunctionType) and module != "__main__"):
            self._note(module)
            part.lines[name] = f"from {module} import {getattr(value, '__name__', name)} as {name}"
        else:
            text = _constant(name, value, user)
            part.lines[name] = f"{name} = triton.language.constexpr({text})" if annotated else f"{name} = {text}"

    def _note(self, module: str) -> None:
        """An imported module enters the digest with its file, unless it belongs to Triton, whose version does."""
        if module.split(".")[0] == "triton":
            return
        file = getattr(sys.modules.get(module), "__file__", None)
        self.imported[module] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _free_names(node: ast.FunctionDef) -> set[str]:
    """Names that the arguments' annotations, defaults and the body read and do not bind themselves."""
    used = [n for part in (node.args, *node.body) for n in ast.walk(part)]
    bound = {n.id for n in used if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in used if isinstance(n, ast.arg)}
    return {n.id for n in used if isinstance(n, ast.Name)} - bound


def _constant(name: str, value, user: FunctionType) -> str:
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    try:
        if type(value).__module__ == "__main__":
            raise TypeError("its class exists only here")
        # Pickled: tl.constexpr, dtypes, Gluon layouts, infinities.
        return f"__import__('pickle').loads({pickle.dumps(value, protocol=4)!r})"
    except Exception as error:
        raise LabError(
            f"compile_kernel: {user.__name__} uses {name}, a {type(value).__name__} that cannot be carried to the "
            "compiler; pass it as an argument or make it a tl.constexpr."
        ) from error
