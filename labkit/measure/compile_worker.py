"""Compiles kernels ahead of time; run as a script, in its own process, by ``labkit.measure.compile``.

Requests come on stdin, replies go to stdout, and each is handled in a fork, so that Triton is loaded only once. Nothing
of labkit is imported: only Triton, and what the kernel itself imports. No GPU is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def _compile(request: dict) -> dict:
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = getattr(importlib.import_module(request["module"]), request["name"])
    source = ASTSource
    if request["gluon"]:
        from triton.experimental.gluon._runtime import GluonASTSource as source
    knobs.nvidia.dump_ptxas_log = True
    target = GPUTarget("cuda", request["capability"], 32)
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in request["divisible"]}
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = compile(
            source(kernel, request["signature"], pickle.loads(request["constexprs"]), attributes),
            target=target,
            options=request["options"],
        )
    numbers = {
        key: int(found.group(1)) if (found := re.search(pattern, log.getvalue())) else 0
        for key, pattern in {
            "registers": r"Used (\d+) registers",
            "stack_bytes": r"(\d+) bytes stack frame",
            "spill_store_bytes": r"(\d+) bytes spill stores",
            "spill_load_bytes": r"(\d+) bytes spill loads",
        }.items()
    }
    if not numbers["registers"]:
        raise RuntimeError(f"ptxas printed no register count: {log.getvalue()!r}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        # stderr holds nvdisasm's remarks on the container format of older architectures
        dump = subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", cubin.name], capture_output=True, text=True)
    if dump.returncode:
        raise RuntimeError(f"cuobjdump: {dump.stderr.strip()}")
    return {
        **numbers,
        "shared_bytes": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
        "num_stages": compiled.metadata.num_stages,
        "ptx": compiled.asm["ptx"],
        "ttgir": compiled.asm["ttgir"],
        "sass": re.sub(
            r" *(/\* 0x[0-9a-f]{16} \*/)", "", re.sub(r"\n +/\* 0x[0-9a-f]{16} \*/", "", dump.stdout)
        ),  # no encodings
    }


def _explain(error: BaseException) -> dict:
    """The innermost compiler message and the source line it points at."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    told = next((e for e in reversed(chain) if "\n" in str(e) and "^" in str(e)), None)
    if told is None:
        message = str(chain[-1]).strip()
        return {"line": "", "message": message.splitlines()[0] if message else type(chain[-1]).__name__}
    lines = str(told).splitlines()
    caret = max(i for i, text in enumerate(lines) if text.strip() == "^")
    after = " ".join(text.strip() for text in lines[caret + 1 :] if text.strip())
    inner = str(chain[-1]).strip() if chain[-1] is not told else ""
    return {"line": lines[caret - 1].strip(), "message": after or inner or type(chain[-1]).__name__}


def _handle(request: dict) -> dict:
    """Compile in this process, which is thrown away afterwards."""
    sys.path[:0] = request["path"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "cache"))  # a cache hit would print no resource usage
        for name, text in request["files"].items():
            Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            return _compile(request)
        except BaseException as error:  # everything is reported: this process has no other voice
            return {"error": _explain(error)}


def _in_a_child(request: dict) -> bytes:
    """The reply as JSON. A fork has Triton loaded, and neither its crash nor its modules stay with the next request."""
    with tempfile.TemporaryFile() as reply, tempfile.TemporaryFile() as noise:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(noise.fileno(), 1)  # the compiler may print
                os.dup2(noise.fileno(), 2)
                reply.write(json.dumps(_handle(request)).encode())
                reply.flush()
                status = 0
            finally:
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        reply.seek(0)
        if code == 0:
            return reply.read()
        noise.seek(0)
        said = noise.read().decode(errors="replace").strip().splitlines()
        return json.dumps({"crash": f"code {code}: {said[-1] if said else 'no message'}"}).encode()


def _warm_up() -> None:
    """Load once what every fork needs: torch, which most kernels' modules import, and all of Triton's compiler."""
    import torch  # noqa: F401
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    @triton.jit
    def kernel(x_ptr):
        tl.store(x_ptr, 1.0)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        compile(ASTSource(kernel, {"x_ptr": "*fp32"}), target=GPUTarget("cuda", 80, 32))


def serve() -> None:
    """Answer requests until stdin ends. Both ways a message is 8 bytes of length, then a pickle or a JSON text."""
    _warm_up()

    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while len(head := requests.read(8)) == 8:
        reply = _in_a_child(pickle.loads(requests.read(int.from_bytes(head, "big"))))
        replies.write(len(reply).to_bytes(8, "big") + reply)
        replies.flush()


if __name__ == "__main__":
    serve()
