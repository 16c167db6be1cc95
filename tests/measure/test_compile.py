"""Ahead-of-time compilation for six architectures without a GPU, from a process that may run Triton's interpreter."""

from __future__ import annotations

import json
import linecache
import subprocess
import sys
import textwrap
import time

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels import stream
from labkit.errors import LabError
from labkit.measure import ARCHITECTURES, compile_kernel

SCALE_BY = tl.constexpr(3)
COUNT: tl.constexpr = 4


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def stream_arguments(name: str, dtype: str = "bf16", n: str = "i32") -> dict:
    """What a launch of a stream kernel with its own settings passes: n is not specialised."""
    launch, size = stream.LAUNCH[name], {"bf16": 2, "fp16": 2, "fp32": 4}[dtype]
    pointers = {"copy": ("x", "out"), "scale": ("x", "out"), "triad": ("a", "b", "out"), "read": ("x", "out")}[name]
    signature = {f"{p}_ptr": f"*{dtype}" for p in pointers} | {"n": n}
    constexprs = {"VEC": 16 // size, "BLOCK": launch.block_bytes // size, "LOAD": launch.load, "STORE": launch.store}
    if name in ("scale", "triad"):
        signature["alpha"] = "fp32"
    if name == "read":
        signature["out_ptr"] = "*fp32"
        constexprs["BLOCK"] = stream.CHUNK
        del constexprs["STORE"]
    return {
        "kernel": getattr(stream, f"_{name}_kernel"),
        "signature": signature,
        "constexprs": constexprs,
        "num_warps": launch.num_warps,
        "divisible_by_16": [f"{p}_ptr" for p in pointers],
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", stream.LAUNCH)
def test_stream_kernels_move_16_bytes_at_a_time_and_do_not_spill(name, arch):
    arguments = stream_arguments(name)
    c = compile_kernel(arch=arch, **arguments)
    inputs = 2 if name == "triad" else 1
    accesses = arguments["constexprs"]["BLOCK"] * 2 // 16 // (32 * c.num_warps)  # a thread's, to one tensor
    assert c.count("LDG.128") == inputs * accesses
    assert c.count("STG.128") == (0 if name == "read" else accesses)
    assert c.count("LDG") - c.count("LDG.128") == inputs, "one narrow load an input, for the odd elements at the end"
    assert c.spills == 0 and c.stack_bytes == 0 and c.count("LDL") == c.count("STL") == 0
    in_flight = c.occupancy.warps * 32 * inputs * accesses * 16
    assert in_flight >= 24 * 2**10, "bytes in flight an SM; the H200 needs 25 KB, and has 32 KB: 64 warps to their 48"


@pytest.mark.parametrize(("dtype", "n"), [("fp32", "i32"), ("fp16", "i64")])
def test_other_types_and_64_bit_lengths_keep_wide_accesses(dtype, n):
    for name in stream.LAUNCH:
        c = compile_kernel(arch="sm_90", **stream_arguments(name, dtype, n))
        assert c.count("LDG.128") and c.spills == 0


@triton.jit
def _helper(x):
    return x * SCALE_BY + COUNT


@triton.jit
def _uses_all(x_ptr, out_ptr, n, BLOCK: tl.constexpr, PRECISE: tl.constexpr = True):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = _helper(tl.load(x_ptr + cols, mask=cols < n))
    if PRECISE:
        x = tl.exp(x)
    tl.store(out_ptr + cols, x, mask=cols < n)


ALL = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}


def test_helpers_constants_and_defaults_are_carried_over():
    c = compile_kernel(_uses_all, ALL, {"BLOCK": 1024}, "sm_90")
    assert c.name == "_uses_all" and c.arch == "sm_90" and ".target sm_90a" in c.ptx and "ttg.num-warps" in c.ttgir
    assert c.count("MUFU.EX2") >= 8 and "0f40400000" in c.ptx.lower()  # 3.0
    assert compile_kernel(_uses_all, ALL, {"BLOCK": 1024, "PRECISE": False}, "sm_90").count("MUFU") == 0


def test_an_argument_that_is_not_divisible_costs_the_wide_accesses():
    wide = compile_kernel(_uses_all, ALL, {"BLOCK": 1024}, "sm_80")
    narrow = compile_kernel(_uses_all, ALL, {"BLOCK": 1024}, "sm_80", divisible_by_16=["x_ptr", "out_ptr"])
    assert wide.count("LDG.E.128") == 2 and narrow.count("LDG.128") == 0 and narrow.count("LDG") == 8


def test_a_kernel_from_a_notebook_cell_compiles_under_the_interpreter(tmp_path):
    """As in a notebook: defined in __main__, source known to linecache alone, TRITON_INTERPRET=1."""
    cell = textwrap.dedent("""
        import triton
        import triton.language as tl
        FACTOR = tl.constexpr(2.5)

        @triton.jit
        def helper(x):
            return x * FACTOR

        @triton.jit
        def cell_kernel(x_ptr, n, BLOCK: tl.constexpr):
            i = tl.arange(0, BLOCK)
            tl.store(x_ptr + i, helper(tl.load(x_ptr + i)), mask=i < n)
    """)
    script = textwrap.dedent(f"""
        import linecache
        cell = {cell!r}
        linecache.cache["<cell 1>"] = (len(cell), None, cell.splitlines(True), "<cell 1>")
        exec(compile(cell, "<cell 1>", "exec"))
        from labkit.measure import compile_kernel
        assert type(cell_kernel).__name__ == "InterpretedFunction"
        print(compile_kernel(cell_kernel, {{"x_ptr": "*fp16", "n": "i32"}}, {{"BLOCK": 256}}, "sm_89").registers)
    """)
    environment = {**__import__("os").environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert 8 <= int(done.stdout) <= 64 and done.stderr == ""


def cell(name: str, text: str, **scope):
    """What ``text`` defines, as if a notebook cell of module ``name`` had run."""
    text = textwrap.dedent(text)
    linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(True), f"<{name}>")
    scope = {"__name__": name, "triton": triton, "tl": tl, **scope}
    exec(compile(text, f"<{name}>", "exec"), scope)
    return scope


def test_two_modules_may_use_one_name_for_two_things():
    other = cell("other", "K = tl.constexpr(7)\n@triton.jit\ndef seven(x):\n    return x * K\n")
    mine = cell(
        "mine",
        """
        K = tl.constexpr(5)
        @triton.jit
        def k(x_ptr):
            tl.store(x_ptr, seven(tl.load(x_ptr)) + K)
        """,
        seven=other["seven"],
    )
    ptx = compile_kernel(mine["k"], {"x_ptr": "*i32"}, arch="sm_80").ptx
    assert ", 7, 5;" in ptx.replace("\t", " ")  # mad.lo.s32 d, x, 7, 5


@gluon.jit
def _gluon_copy(x_ptr, out_ptr, LAYOUT: gl.constexpr):
    i = gl.arange(0, 512, layout=LAYOUT)
    gl.store(out_ptr + i, gl.load(x_ptr + i))


def test_gluon_kernels_compile_with_their_layouts():
    for per_thread, pattern in ((4, "LDG.128"), (1, "LDG")):
        layout = gl.BlockedLayout([per_thread], [32], [4], [0])
        c = compile_kernel(_gluon_copy, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"LAYOUT": layout}, "sm_90")
        assert c.count(pattern) == 4 // per_thread


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, K, SIZE: tl.constexpr, STEP: tl.constexpr):
    rows, steps = tl.arange(0, SIZE), tl.arange(0, STEP)
    acc = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for k in range(0, K, STEP):
        a = tl.load(a_ptr + rows[:, None] * K + (k + steps)[None, :])
        b = tl.load(b_ptr + (k + steps)[:, None] * SIZE + rows[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * SIZE + rows[None, :], acc)


PRODUCT = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "K": "i32"}


@pytest.mark.parametrize(("arch", "unit"), [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA")])
def test_each_architecture_uses_its_own_matrix_units(arch, unit):
    c = compile_kernel(_product, PRODUCT, {"SIZE": 128, "STEP": 64}, arch)
    assert c.count(unit) > 0 and c.shared_bytes > 0 and unit in c.stats.summary()


def test_too_much_shared_memory_is_told_in_numbers():
    arguments = (PRODUCT, {"SIZE": 128, "STEP": 128})
    needed = compile_kernel(_product, *arguments, "sm_80", num_stages=3).shared_bytes
    assert needed == 2 * 128 * 128 * 2 * 2  # two tiles of fp16, two of the three stages buffered
    with pytest.raises(
        LabError, match=rf"_product needs {needed} bytes of shared memory a block, and sm_89 has 101376"
    ):
        compile_kernel(_product, *arguments, "sm_89", num_stages=3)


def test_a_spilling_kernel_says_so():
    c = compile_kernel(_product, PRODUCT, {"SIZE": 128, "STEP": 64}, "sm_80", num_warps=4, maxnreg=64)
    assert c.registers <= 64 and c.spills > 0 and c.count("LDL") + c.count("STL") > 0
    assert "local memory (spills)" in c.stats.summary() and f"{c.spills} bytes spilled" in str(c)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sm_70"}, r"Unknown architecture 'sm_70'; labkit compiles for sm_80, sm_86"),
        ({"signature": {**ALL, "m": "i32"}}, r"takes \(x_ptr, out_ptr, n, BLOCK, PRECISE\); it has no argument m"),
        ({"signature": {"x_ptr": "*fp32"}}, r"needs a type for out_ptr, n, such as"),
        ({"signature": {**ALL, "n": "int"}}, r"n='int' is no Triton type"),
        ({"signature": {**ALL, "n": 4}}, r"n=4 is no Triton type"),
        ({"constexprs": {}}, r"the constexpr BLOCK needs a value"),
        ({"constexprs": {"BLOCK": 64, "n": 1}}, r"n has a type and a constexpr value"),
        ({"constexprs": {"BLOCK": 64, "F": 1}}, r"it has no argument F"),
        ({"constexprs": {"BLOCK": lambda: 1}}, r"cannot be carried to the compiler"),
        ({"divisible_by_16": ["BLOCK"]}, r"divisible_by_16 names BLOCK"),
        ({"kernel": 3}, r"got a int, needs a Triton kernel"),
        ({"kernel": lambda x: x}, r"got a lambda, needs a Triton kernel"),
        ({"arch": 90}, r"Unknown architecture 90; labkit compiles for sm_80"),
        ({"arch": None}, r"Unknown architecture None; labkit compiles for sm_80"),
        ({"signature": None}, r"signature is None; it must map arguments to types, such as {'x_ptr': '\*fp16'}"),
        ({"constexprs": 64}, r"constexprs is 64; it must map arguments to values"),
        ({"num_warps": 128}, r"num_warps is 128; a block has 1, 2, 4, 8, 16 or 32 warps: .* at most 1024 threads"),
        ({"num_warps": 6}, r"num_warps is 6;"),
        ({"num_warps": 0}, r"num_warps is 0;"),
        ({"num_warps": 4.0}, r"num_warps is 4\.0;"),
        ({"constexprs": {"BLOCK": 100}}, r"(?s)does not compile for sm_89: .*power of 2.*\n    cols = .*tl\.arange"),
    ],
)
def test_errors_are_one_sentence(change, message):
    arguments = {"kernel": _uses_all, "signature": ALL, "constexprs": {"BLOCK": 64}, "arch": "sm_89", **change}
    with pytest.raises(LabError, match=message):
        compile_kernel(**arguments)


def test_a_lambda_inside_triton_jit_is_named():
    with pytest.raises(LabError, match="got a lambda, needs a Triton kernel"):
        compile_kernel(triton.jit(lambda x_ptr: tl.store(x_ptr, 1)), {"x_ptr": "*i32"})


def test_a_kernel_whose_source_is_lost_is_named():
    scope = {"triton": triton, "tl": tl, "__name__": "lost"}
    exec("def lost(x_ptr):\n    tl.store(x_ptr, 0)", scope)
    with pytest.raises(LabError, match="source text of lost is not available"):
        compile_kernel(scope["lost"], {"x_ptr": "*i32"})


def test_the_second_time_is_instant_and_a_changed_kernel_is_compiled_again():
    first = cell("changing", "@triton.jit\ndef k(x_ptr):\n    tl.store(x_ptr, 11)\n")["k"]
    a = compile_kernel(first, {"x_ptr": "*i32"})
    start = time.perf_counter()
    assert compile_kernel(first, {"x_ptr": "*i32"}) == a
    assert time.perf_counter() - start < 0.2  # a compilation takes about a second
    second = cell("changing", "@triton.jit\ndef k(x_ptr):\n    tl.store(x_ptr, 22)\n")["k"]
    assert ", 22;" in compile_kernel(second, {"x_ptr": "*i32"}).ptx


def test_a_home_that_cannot_be_written_only_loses_the_cache(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    kernel = cell("uncached", "@triton.jit\ndef k(x_ptr):\n    tl.store(x_ptr, 33)\n")["k"]
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "file"))
    first, second = (compile_kernel(kernel, {"x_ptr": "*i32"}) for _ in range(2))
    assert first.sass == second.sass and first.count("STG") == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["[]", "{", "null", '{"registers": 3}', '{"error": {}}', "other kinds"])
def test_a_kept_result_that_is_none_is_compiled_again(text, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    first = compile_kernel(_uses_all, ALL, {"BLOCK": 64}, "sm_80")
    (kept,) = (tmp_path / "compiled").glob("*.json")
    wrong = json.dumps({**json.loads(kept.read_text()), "registers": "3"})
    kept.write_text(wrong if text == "other kinds" else text)
    again = compile_kernel(_uses_all, ALL, {"BLOCK": 64}, "sm_80")
    assert (again.sass, again.registers) == (first.sass, first.registers)  # ptx names the folder it was compiled in
    assert json.loads(kept.read_text()) == {n: v for n, v in vars(again).items() if n not in ("name", "arch")}
