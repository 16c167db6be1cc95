"""Attention beyond the operator test: another oracle, Hopper's kernel on threads, machine code, levels, refusals."""

from __future__ import annotations

import math
import random
import re
import threading

import pytest
import torch
from triton.experimental.gluon import language as gl

from kernels import flash_attention as page
from kernels import flash_hopper, flash_levels
from kernels.flash_attention import CASES, LAUNCH, LAUNCH_FP32, LAUNCH_SMALL, OP, flash_attention
from labkit.measure.compile import ARCHITECTURES, compile_kernel
from tests.kernels import gluon_on_threads
from tests.kernels.gluon_on_threads import load_on_threads

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")


def packed(q_lens, k_lens, heads, kv_heads, head_dim, dtype=torch.float32, device="cpu", seed=0):
    """q, k, v of random sequences with these lengths, and their cu_seqlens."""
    generator = torch.Generator(device).manual_seed(seed)

    def tokens(lengths, n):
        return torch.randn(sum(lengths), n, head_dim, generator=generator, device=device).to(dtype)

    cu = (torch.tensor([0, *x], device=device).cumsum(0).int() for x in (q_lens, k_lens))
    return tokens(q_lens, heads), tokens(k_lens, kv_heads), tokens(k_lens, kv_heads), *cu


# ------------------------------------------------------------------------------------------------ what is computed


@interpreted
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_torchs_attention_a_sequence_at_a_time(causal):
    q_lens, k_lens = (3, 70, 1, 129), (40, 70, 131, 129)
    q, k, v, cu_q, cu_k = packed(q_lens, k_lens, 6, 2, 32)
    out, _ = flash_attention(q, k, v, cu_q, cu_k, causal=causal)
    for i, (m, n) in enumerate(zip(q_lens, k_lens, strict=True)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        mask = torch.ones(m, n, dtype=torch.bool).tril(n - m) if causal else None
        args = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        want = torch.nn.functional.scaled_dot_product_attention(*args, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out[rows], want[0].transpose(0, 1), rtol=1e-5, atol=2e-6)


@interpreted
def test_lse_merges_two_halves_of_the_keys():
    q, k, v, *_ = packed((40,), (90,), 2, 1, 64)
    whole, lse = flash_attention(q, k, v, causal=False)
    parts = [flash_attention(q, k[keys], v[keys], causal=False) for keys in (slice(0, 33), slice(33, 90))]
    torch.testing.assert_close(torch.logaddexp(parts[0][1], parts[1][1]), lse)
    weights = [torch.exp(part - lse).T[:, :, None] for _, part in parts]
    torch.testing.assert_close(sum(w * o for w, (o, _) in zip(weights, parts, strict=True)), whole)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy, in the interpreter
@interpreted
def test_nan_in_a_query_stays_in_its_row():
    q, k, v, *_ = packed((70,), (70,), 2, 1, 64)
    want, lse = flash_attention(q, k, v)
    q[33, 1] = math.nan
    got, got_lse = flash_attention(q, k, v)
    assert got[33, 1].isnan().all() and got_lse[1, 33].isnan()
    got[33, 1], got_lse[1, 33] = want[33, 1], lse[1, 33]
    assert torch.equal(got, want) and torch.equal(got_lse, lse)


@interpreted
def test_a_given_output_is_written_and_returned():
    q, k, v, *_ = packed((9,), (9,), 2, 2, 64)
    wide = torch.full((9, 4, 64), 7.0)
    out, _ = flash_attention(q, k, v, out=wide[:, ::2])
    assert out.data_ptr() == wide.data_ptr() and torch.equal(out, flash_attention(q, k, v)[0])
    assert (wide[:, 1::2] == 7.0).all()


def test_cost_counts_the_pairs_that_are_seen():
    q, k, v, cu_q, cu_k = packed((2, 0, 3), (5, 4, 2), 4, 2, 64, torch.float16)
    for options in ({}, {"causal": False}, {"window": 2}):
        pairs = sum(
            int(page.visible(m, n, options.get("causal", True), options.get("window"), "cpu").sum())
            for m, n in ((2, 5), (0, 4), (3, 2))
        )
        cost = OP.cost(q, k, v, cu_q, cu_k, **options)
        assert cost.flops == 4 * 64 * pairs * 4
        assert cost.bytes == (2 * 5 * 4 + 2 * 11 * 2) * 64 * 2 + 4 * 5 * 4
    assert OP.cost(q, q, q).flops == 4 * 64 * (1 + 2 + 3 + 4 + 5) * 4


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 64), (1, 130, 32), (2, 65, 128)], ids=str)
def test_all_levels_compute_the_same(shape, dtype):
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    exact = page.flash_attention_reference(*(x.double().transpose(0, 1) for x in (q, k, v)))[0].transpose(0, 1)
    for level in flash_levels.LEVELS:
        out = level(q, k, v)
        assert out.dtype == dtype and out.shape == exact.shape
        assert (out.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max(), level.__name__
    with pytest.raises(ValueError, match="attention_level1: k must be a contiguous"):
        flash_levels.attention_level1(q, k[:, :0], v)


# ------------------------------------------------------------------------------------------------ Hopper's kernel


def hopper_takes(case) -> bool:
    inputs = case.make("cpu", torch.float32, torch.Generator().manual_seed(0))
    q, k = inputs["q"], inputs["k"]
    plain = inputs.get("window") is None and not inputs.get("softcap") and inputs.get("scale", 1) > 0
    return q.shape[2] in flash_hopper.HEAD_DIMS and plain and bool(k.shape[0] and q.shape[0])


def on_threads(edit=str, sms=2, watch=None):
    """Hopper's kernel as a function with flash_attention's arguments. ``watch`` gets every tile, before it is told."""
    module = load_on_threads(flash_hopper, edit)
    module._sms = lambda device: sms
    if watch:
        publish = module._publish

        def watched(board, tiles, tile):
            watch(gluon_on_threads.here.program, [int(x) for x in tile])
            publish(board, tiles, tile)

        module._publish = watched

    def run(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, *, causal=True, scale=None):
        out = torch.full(q.shape, math.nan, dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), math.nan)
        cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        module.launch(q, k, v, out, lse, cu_seqlens_q, cu_k, causal, q.shape[2] ** -0.5 if scale is None else scale)
        return out, lse

    return run


def same(got, want) -> bool:
    return all(torch.allclose(g, w, rtol=1e-5, atol=3e-5, equal_nan=True) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("case", [c for c in CASES if hopper_takes(c)], ids=lambda c: c.name)
@pytest.mark.parametrize("sms", [1, 3])
def test_hoppers_kernel_on_threads(case, sms):
    inputs = case.make("cpu", torch.float32, torch.Generator().manual_seed(0))
    assert same(on_threads(sms=sms)(**inputs), OP.reference(**inputs))


def many_tiles():
    """Four sequences with up to five key tiles, the last of them NaN."""
    q, k, v, cu_q, cu_k = packed((1, 300, 0, 140, 70), (600, 300, 9, 290, 70), 2, 1, 64)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[cu[4] :] = math.nan
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def test_hoppers_kernel_takes_many_tiles():
    inputs = many_tiles()
    want = OP.reference(**inputs)
    random.seed(0)
    for sms in (1, 2, 4, 7):
        assert same(on_threads(sms=sms)(**inputs), want), sms


# 9 row blocks in 15 slots, two heads: the unused slots are the first, some between, and the last
UNUSED = ((0, 1, 300, 0, 0, 140, 0, 129, 70, 0), (5, 40, 300, 9, 0, 290, 0, 129, 70, 3))


@pytest.mark.parametrize("sms", [1, 2, 5, 100])
def test_hoppers_programs_draw_every_tile_once(sms):
    q, k, v, cu_q, cu_k = packed(*UNUSED, 2, 1, 64)
    drawn = []
    got = on_threads(sms=sms, watch=lambda program, tile: drawn.append((program, *tile)))(q, k, v, cu_q, cu_k)
    assert same(got, OP.reference(q, k, v, cu_q, cu_k))
    tiles = [(head, start, row) for _, head, start, _, _, _, row in drawn if head >= 0]
    blocks = [(int(cu_q[i]), row) for i, n in enumerate(UNUSED[0]) for row in range(0, n, flash_hopper.BLOCK_M.value)]
    assert sorted(tiles) == sorted((head, *block) for head in range(2) for block in blocks)
    programs = min(sms, 2 * 15)
    assert sorted(program for program, head, *_ in drawn if head < 0) == list(range(programs)), "each is told the end"


def test_a_program_of_hoppers_kernel_that_falls_behind_draws_fewer():
    q, k, v, cu_q, cu_k = packed(*UNUSED, 2, 1, 64)
    drawn = {0: 0, 1: 0}
    other_ended = threading.Event()

    def watch(program, tile):
        if program == 0 and drawn[0] == 1:
            assert other_ended.wait(5)
        if tile[0] >= 0:
            drawn[program] += 1
        elif program == 1:
            other_ended.set()

    assert same(on_threads(sms=2, watch=watch)(q, k, v, cu_q, cu_k), OP.reference(q, k, v, cu_q, cu_k))
    assert drawn == {0: 2, 1: 16}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the copies of a broken kernel
@pytest.mark.parametrize(
    ("flaw", "old", "new"),
    [
        ("keys are not waited for", r"mbarrier\.wait\(k_full\.index\(k_place\).*\n", "pass\n"),
        ("values are not waited for", r"mbarrier\.wait\(v_full\.index\(v_place\).*\n", "pass\n"),
        (
            "keys are given back before they are read",
            r"( +)s, acc = warpgroup_mma_wait\(0, deps=\[s, acc\]\)\n +(mbarrier\.arrive\(k_empty.*)\n",
            r"\1\2\n\1s, acc = warpgroup_mma_wait(0, deps=[s, acc])\n",
        ),
        ("the turn is not passed on", r"mbarrier\.arrive\(others_turn, count=1\)\n +s, acc", "s, acc"),
        (
            "tiles run on into the next sequence",
            r"LIMIT, k_start \+ k_len, LIMIT - k_len \+ row",
            "0, 0, k_start + row",
        ),
        ("tiles are read before they are told", r"mbarrier\.wait\(told.*\n", "pass\n"),
        (
            "tiles are told before the last ones are read",
            r"( +for i in gl\.static_range\(CONSUMERS\):\n +mbarrier\.wait\(q_empty(?:.*\n)+?)( +_publish\(board.*\n)",
            r"\2\1",
        ),
        ("the diagonal is off by one", r"rows \+ shift, k_len - 1", "rows + shift + 1, k_len - 1"),
    ],
    ids=lambda x: x.replace(" ", "-") if " " in x and "(" not in x else "",
)
def test_threads_find_what_is_wrong(flaw, old, new, monkeypatch):
    monkeypatch.setattr(gluon_on_threads, "TIMEOUT_S", 0.5)
    inputs = many_tiles()
    want = OP.reference(**inputs)

    def edit(text):
        changed = re.sub(old, new, text)
        assert changed != text, "the kernel has no such line"
        return changed

    def passes(land, read):
        monkeypatch.setattr(gluon_on_threads, "LAND_S", land)
        monkeypatch.setattr(gluon_on_threads, "READ_S", read)
        try:
            return same(on_threads(edit, sms=1)(**inputs), want)
        except (TimeoutError, AssertionError):
            return False

    # copies now early, now late, by more than threads differ otherwise; then reads as late as that
    hidden = all(passes(land=(0.0, 0.006), read=(0.0,)) for _ in range(3))
    assert not (hidden and passes(land=(0.0,), read=(0.01,))), flaw


def test_hopper_needs_what_it_says():
    q = torch.zeros(4, 2, 64, dtype=torch.float16)
    assert not flash_hopper.supports(q, q, q, q, 1.0, None, None)  # no GPU
    with pytest.raises(ValueError, match="path 'hopper' needs a GPU of compute capability 9.0"):
        flash_attention(q, q, q, path="hopper")


# ------------------------------------------------------------------------------------------------ machine code

TENSOR_CORES = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}  # HMMA elsewhere


def compiled(arch, launch, head_dim, dtype, **features):
    pointers = {f"{x}_ptr": f"*{dtype}" for x in ("q", "k", "v", "out")}
    pointers |= {"lse_ptr": "*fp32", "cu_q_ptr": "*i32", "cu_k_ptr": "*i32"}
    integers = ["num_seqs", "tokens", "tokens_k", *(f"stride_{x}{d}" for x in "qkvo" for d in "th"), "window"]
    signature = {
        **pointers,
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(("unit", "softcap", "per_softcap"), "fp32"),
    }
    constexprs = dict(VARLEN=True, GROUP=4, CAUSAL=True, WINDOW=False, SOFTCAP=False, PRESCALE=False) | features
    constexprs |= dict(BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, HEAD_DIM=head_dim)
    constexprs |= dict(BLOCK_D=max(64, 1 << (head_dim - 1).bit_length()), PRECISION="ieee" if dtype == "fp32" else None)
    signature = {name: kind for name, kind in signature.items() if name not in features}
    return compile_kernel(
        page._flash_attention_kernel,
        signature,
        constexprs,
        arch,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        divisible_by_16=[n for n in signature if n.endswith("_ptr") or n.startswith("stride")],
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_machine_code(arch, head_dim):
    code = compiled(arch, LAUNCH[max(64, 1 << (head_dim - 1).bit_length())], head_dim, "bf16")
    assert code.spills == 0 and code.stack_bytes == 0, code
    assert code.count(TENSOR_CORES.get(arch, "HMMA")) > 0
    assert code.count("LDG.128") > 0 and code.count("LDGSTS.128") > 0, "keys and values are copied 16 bytes at a time"
    assert code.count("STG.128") > 0 and not code.count("STG.U16"), "the output is written 16 bytes at a time"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_one_sequence_and_lengths_of_one_compile(arch):
    """Triton makes an integer argument that is 1 a constant, so it has another type; the interpreter does not."""
    ones = dict.fromkeys(("num_seqs", "tokens", "tokens_k", "window", "stride_kh"), 1)
    for features in ({"VARLEN": False}, {"VARLEN": False, "CAUSAL": False}, ones, {"VARLEN": False, **ones}):
        code = compiled(arch, LAUNCH[64], 64, "bf16", **features)
        assert code.spills == 0, code
    assert compiled(arch, LAUNCH[64], 64, "bf16", WINDOW=True, PRESCALE=True, VARLEN=False, **ones).spills == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", LAUNCH_SMALL)
def test_machine_code_with_window_and_softcap(arch, head_dim):
    code = compiled(arch, LAUNCH_SMALL[head_dim], head_dim, "fp16", WINDOW=True, SOFTCAP=True)
    assert code.spills == 0 and code.count(TENSOR_CORES.get(arch, "HMMA")) > 0, code


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", LAUNCH_FP32)
def test_machine_code_in_fp32(arch, head_dim):
    code = compiled(arch, LAUNCH_FP32[head_dim], head_dim, "fp32")
    assert code.spills <= 16, f"{code}: ptxas gives up a register or two for occupancy, no more"
    assert code.count("FFMA") > 0
    assert not any(code.count(op) for op in ("HMMA", "HGMMA", "UTCHMMA", "UTCMMA")), "fp32 must not become TF32"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code_of_the_levels(arch):
    tile = {"D": 128, "BLOCK_M": 128, "BLOCK_N": 32, "PRECISION": None}
    kernels = (
        (flash_levels._scores_kernel, {"q_ptr": "*fp16", "k_ptr": "*fp16", "s_ptr": "*fp32"}, "scale", tile),
        (flash_levels._softmax_kernel, {"s_ptr": "*fp32"}, None, {"BLOCK": 4096}),
        (flash_levels._output_kernel, {"p_ptr": "*fp32", "v_ptr": "*fp16", "out_ptr": "*fp16"}, None, tile),
        (flash_levels._level1_kernel, dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*fp16"), "scale", tile),
        (flash_levels._level2_kernel, dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*fp16"), "unit", tile),
    )
    for kernel, pointers, factor, constexprs in kernels:
        signature = {**pointers, "S": "i32", **({factor: "fp32"} if factor else {})}
        code = compile_kernel(kernel, signature, constexprs, arch, num_warps=8, num_stages=2)
        assert code.spills == 0, code
        assert "D" not in constexprs or code.count(TENSOR_CORES.get(arch, "HMMA")) > 0


def hopper_code(head_dim, dtype, **features):
    kind = gl.bfloat16 if dtype == "bf16" else gl.float16

    def box(*shape):
        return f"tensordesc<{dtype}{list(shape)},{gl.NVMMASharedLayout.get_default_for(list(shape), kind)!r}>"

    rows, keys = flash_hopper.ROWS.value, flash_hopper.BLOCK_N.value
    signature = {
        "q_desc": box(rows, head_dim),
        "k_desc": box(1, 1, keys, head_dim),
        "v_desc": box(1, 1, keys, head_dim),
    }
    signature |= {"out_desc": box(1, 1, rows, head_dim), "lse_ptr": "*fp32", "counter_ptr": "*i32"}
    signature |= {"cu_q_ptr": "*i32", "cu_k_ptr": "*i32"}
    signature |= dict.fromkeys(("num_seqs", "tokens", "tokens_k", "slots", "heads"), "i32") | {"unit": "fp32"}
    signature = {name: kind for name, kind in signature.items() if name not in features}
    return compile_kernel(
        flash_hopper.flash_hopper_kernel,
        signature,
        dict(VARLEN=True, GROUP=4, CAUSAL=True, HEAD_DIM=head_dim) | features,
        "sm_90",
        num_warps=4,
        divisible_by_16=["lse_ptr", "counter_ptr", "cu_q_ptr", "cu_k_ptr"],
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", flash_hopper.HEAD_DIMS)
def test_machine_code_of_hoppers_kernel(head_dim, dtype):
    code = hopper_code(head_dim, dtype)
    assert code.spills == 0, code
    # each of two warpgroups: scores at three places (first tile, masked, plain), output at three
    scores, outputs = 2 * 3 * head_dim // 16, 2 * 3 * 128 // 16
    assert code.count("HGMMA") == scores + outputs and not code.count("HMMA")
    from_registers = len(re.findall(r"HGMMA\S+ R\d+, R\d+, gdesc", code.sass))
    assert from_registers == outputs, "probabilities stay in registers"
    # the tensor cores are waited for once a step, not after every instruction: ptxas has not serialised them
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code.sass)) == 2 * 4
    assert code.count("UTMALDG") > 0 and code.count("UTMASTG") == 2 and code.count("USETMAXREG") > 0
    assert not code.count("LDG.128"), "all tiles go through TMA"


def test_machine_code_of_hoppers_kernel_without_mask_or_lengths():
    for head_dim in flash_hopper.HEAD_DIMS:
        for features in ({"CAUSAL": False}, {"VARLEN": False}, {"CAUSAL": False, "VARLEN": False}):
            code = hopper_code(head_dim, "bf16", **features)
            assert code.spills == 0 and len(re.findall(r"WARPGROUP\.DEPBAR", code.sass)) == 2 * 4, code
    ones = dict.fromkeys(("num_seqs", "tokens", "tokens_k", "slots", "heads"), 1)
    for features in (ones, {"VARLEN": False, **ones}):  # integers that are 1 become constants
        assert hopper_code(64, "fp16", **features).spills == 0


# ------------------------------------------------------------------------------------------------ what is refused


def arguments(**changed):
    q = torch.zeros(6, 4, 64)
    k = torch.zeros(6, 2, 64)
    return {"q": q, "k": k, "v": k.clone(), **changed}


CU = torch.tensor([0, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(6, 256)}, r"q must be \[tokens, heads, head_dim\], got shape \(6, 256\)"),
        ({"k": torch.zeros(6, 2, 64).half()}, r"k must have q's dtype torch\.float32, got torch\.float16"),
        ({"q": torch.zeros(6, 4, 64, dtype=torch.int32)}, r"q must be float32, float16 or bfloat16, got torch\.int32"),
        ({"v": torch.zeros(6, 2, 64, device="meta")}, "v must be on q's device cpu, got meta"),
        ({"k": torch.zeros(6, 64, 2).transpose(1, 2)}, r"k must have a contiguous last dimension, got stride 2"),
        ({"k": torch.zeros(6, 3, 64)}, "q must have a multiple of k's heads, got 4 heads over 3"),
        ({"k": torch.zeros(6, 2, 32)}, "k must have q's head_dim 64, got head_dim 32"),
        ({"v": torch.zeros(5, 2, 64)}, r"v must have k's shape \(6, 2, 64\), got \(5, 2, 64\)"),
        ({"out": torch.zeros(6, 2, 64)}, r"out must have q's shape \(6, 4, 64\), got \(6, 2, 64\)"),
        ({"q": torch.zeros(6, 4, 260)}, "q must have a head_dim of 1 to 256, got head_dim 260"),
        ({"window": -1}, "window must be 0 or more keys"),
        (
            {"window": 4, "causal": False},
            "window must be 0 or more keys, and needs causal=True, got 4 with causal=False",
        ),
        ({"softcap": 0.0}, "softcap must be positive, or None for none, got 0.0"),
        ({"cu_seqlens_k": CU}, "cu_seqlens_q must be given where cu_seqlens_k is"),
        ({"cu_seqlens_q": CU.long()}, r"cu_seqlens_q must be int32 \[seqs \+ 1\].*, got torch\.int64 \(2,\)"),
        ({"cu_seqlens_q": CU, "cu_seqlens_k": CU[:1]}, r"cu_seqlens_k must be int32 .*\(2\), got torch\.int32 \(1,\)"),
        ({"path": "fast"}, "path must be one of hopper, portable, got 'fast'"),
    ],
)
def test_bad_input_is_named(changed, message):
    with pytest.raises(ValueError, match=f"^flash_attention: {message}"):
        flash_attention(**arguments(**changed))


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["portable", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (7, 1, 80), (8, 8, 96), (8, 4, 256)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_random_lengths(path, dtype, heads, kv_heads, head_dim, causal):
    rng = random.Random(head_dim)
    q_lens = [rng.choice((0, 1, 7, 64, 100, 128, 129, 500, 1025)) for _ in range(24)]
    k_lens = [max(0, n + rng.choice((-3, 0, 0, 1, 64, 300))) for n in q_lens]
    q, k, v, cu_q, cu_k = packed(q_lens, k_lens, heads, kv_heads, head_dim, dtype, "cuda")
    out, lse = flash_attention(q, k, v, cu_q, cu_k, causal=causal, path=path)
    want, want_lse = OP.reference(q.float(), k.float(), v.float(), cu_q, cu_k, causal=causal)
    assert (out.float() - want).abs().max() < 3 * torch.finfo(dtype).eps * want.abs().max()
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    again = flash_attention(q, k, v, cu_q, cu_k, causal=causal, path=path)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1]), "a second run differs"


@pytest.mark.gpu
def test_a_captured_call_replays():
    """Hopper's kernel draws tiles from a counter, which every replay has to find at zero."""
    lengths = (1, 5000, 0, 129, 700)
    q, k, v, cu_q, cu_k = packed(lengths, lengths, 16, 4, 128, torch.bfloat16, "cuda")
    want = flash_attention(q, k, v, cu_q, cu_k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_attention(q, k, v, cu_q, cu_k)
    for _ in range(3):
        for x in got:
            x.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.gpu
def test_keys_past_two_to_the_31_elements():
    stride = 2**24
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    store = torch.empty(300 * stride, dtype=torch.float16, device="cuda")
    far = store.as_strided((300, 2, 64), (stride, 64, 1))
    q, k, v, *_ = packed((300,), (300,), 4, 2, 64, torch.float16, "cuda")
    for path in ("portable", None):
        want = flash_attention(q, k, v, path=path)
        far.copy_(k)
        assert torch.equal(flash_attention(q, far, v, path=path)[0], want[0])
        far.copy_(v)
        assert torch.equal(flash_attention(q, k, far, path=path)[0], want[0])


@pytest.mark.gpu
def test_more_sequences_than_a_grid_is_wide():
    q, k, v, cu_q, cu_k = packed((1, 2) * 40_000, (2, 1) * 40_000, 2, 1, 64, torch.float16, "cuda")
    got = flash_attention(q, k, v, cu_q, cu_k)
    portable = flash_attention(q, k, v, cu_q, cu_k, path="portable")
    torch.testing.assert_close(got[0], portable[0], rtol=1e-2, atol=1e-2)
    rows, keys = slice(int(cu_q[79_990]), None), slice(int(cu_k[79_990]), None)
    tail = OP.reference(q[rows], k[keys], v[keys], cu_q[79_990:] - cu_q[79_990], cu_k[79_990:] - cu_k[79_990])
    torch.testing.assert_close(got[0][rows], tail[0], rtol=1e-2, atol=1e-2)
