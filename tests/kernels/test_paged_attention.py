"""Paged decode and extend beyond the operator test: page sizes, splits, the merge, machine code, what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import paged_attention, paged_extend
from kernels.paged_attention import LAUNCH, OP, Launch, decode_splits, decode_workspace, paged_decode
from kernels.paged_cache import paged_cache
from kernels.paged_extend import OP as EXTEND
from labkit.measure.compile import ARCHITECTURES, compile_kernel

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
DECODE_CASES = {case.name: case for case in OP.cases}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def paged(k: torch.Tensor, v: torch.Tensor, lengths, size: int) -> dict:
    """Contiguous k, v [seqs, kv_heads, tokens, head_dim] cut into pages, in random order; everything else is NaN."""
    cache = paged_cache(lengths, k.shape[1], k.shape[3], size, k.device, k.dtype, generator())
    for row, length in enumerate(lengths):
        for i in range(-(-length // size)):
            page, held = cache["block_tables"][row, i], slice(i * size, min(length, (i + 1) * size))
            cache["k_cache"][page, :, : held.stop - held.start] = k[row, :, held]
            cache["v_cache"][page, :, : held.stop - held.start] = v[row, :, held]
    return cache


def contiguous_attention(q, k, v, lengths) -> torch.Tensor:
    """torch's own attention on the unpaged tensors, a sequence at a time: the new token is the last one."""
    out = torch.zeros_like(q)
    for row, n in enumerate(lengths):
        if n:
            args = (q[row, :, None], k[row, :, :n], v[row, :, :n])
            out[row] = torch.nn.functional.scaled_dot_product_attention(*args, enable_gqa=True)[:, 0]
    return out


# ------------------------------------------------------------------------------------------------ what is computed


@interpreted
def test_pages_and_splits_change_where_tokens_lie_not_what_comes_out():
    lengths = [300, 0, 17, 256]
    q, k, v = torch.randn(4, 8, 32), torch.randn(4, 2, 300, 32), torch.randn(4, 2, 300, 32)
    exact = contiguous_attention(q.double(), k.double(), v.double(), lengths)
    inputs = [paged(k, v, lengths, size) for size in (1, 4, 16, 64, 256)]
    for splits in (1, 2, 7, 50):
        same = [paged_decode(q, **pages, splits=splits) for pages in inputs]
        assert torch.equal(same[0], paged_decode(q, **inputs[0], splits=splits)), "a second run differs"
        assert (same[0] - exact).abs().max() < 2e-6
        assert all(torch.equal(same[0], other) for other in same[1:]), "tiles are cut by tokens, so pages must not show"


@interpreted
@pytest.mark.parametrize("launch", [LAUNCH, Launch(4096, 1, 2), Launch(65536, 8, 2)], ids=str)
def test_a_tile_may_be_smaller_or_larger_than_a_page(launch):
    inputs = DECODE_CASES["pages of 64"].make("cpu", torch.float32, generator())
    torch.testing.assert_close(paged_decode(**inputs, launch=launch), OP.reference(**inputs), rtol=0, atol=2e-6)


@interpreted
@pytest.mark.parametrize("options", [{}, {"window": 33}, {"softcap": 2.0}], ids=str)
def test_extending_by_one_token_is_decoding(options):
    inputs = paged_cache([40, 0, 1, 200], 2, 32, 16, "cpu", torch.float32, generator())
    q = torch.randn(4, 8, 32)
    bounds = torch.arange(5, dtype=torch.int32)
    got = EXTEND.triton(q, **inputs, cu_seqlens_q=bounds, max_q=1, **options)
    torch.testing.assert_close(got, paged_decode(q, **inputs, **options), rtol=0, atol=2e-6)


@interpreted
@pytest.mark.parametrize("max_q", [None, 50, 70])
def test_extending_in_chunks_is_extending_at_once(max_q):
    inputs = paged_cache([50, 130], 1, 32, 16, "cpu", torch.float32, generator())
    q = torch.randn(100, 4, 32)
    whole = EXTEND.triton(q, **inputs, cu_seqlens_q=torch.tensor([0, 50, 100], dtype=torch.int32), max_q=max_q)
    before = {**inputs, "seq_lens": inputs["seq_lens"] - torch.tensor([20, 49], dtype=torch.int32)}
    rows = [*range(30), 50]
    part = EXTEND.triton(q[rows], **before, cu_seqlens_q=torch.tensor([0, 30, 31], dtype=torch.int32), max_q=max_q)
    torch.testing.assert_close(part, whole[rows], rtol=0, atol=2e-6)


@interpreted
def test_rows_of_no_sequence_are_left_alone():
    inputs = EXTEND.cases[2].make("cpu", torch.float32, generator())
    q = torch.cat((inputs.pop("q"), torch.full((9, 4, 64), float("nan"))))
    out = EXTEND.triton(q, **inputs, out=torch.full_like(q, 7.0))
    assert (out[-9:] == 7).all() and out.isfinite().all()


@interpreted
def test_merging_empty_states():
    """Three sequences of three splits that have tiles: all are empty states, the first is, the others are."""
    splits, dim, low = 3, 16, float("-inf")
    m = torch.tensor([[low, low, low], [low, 1.0, 2.0], [5.0, low, low]])
    l = torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, 2.0], [4.0, 0.0, 0.0]])
    acc = torch.randn(3, splits, dim) * (l > 0)[..., None]
    out = torch.full((3, 1, dim), float("nan"))
    options = dict(HEAD_DIM=dim, PAGE=16, WINDOW=0, BLOCK_N=128, BLOCK_D=dim, OVERLAP=False, HEADS=1, BLOCK_S=2)
    lengths = torch.full((3,), 384, dtype=torch.int32)
    work = torch.cat([acc.flatten(), m.flatten(), l.flatten()])
    paged_attention._merge_kernel[(3,)](work, lengths, out, splits, 100, dim, dim, **options)
    weight = torch.exp2(m - m.amax(1, keepdim=True)).nan_to_num(0.0)
    expected = (weight[..., None] * acc).sum(1) / (weight * l).sum(1, keepdim=True)
    torch.testing.assert_close(out[:, 0], expected.nan_to_num(0.0))
    assert (out[0] == 0).all()


@interpreted
def test_scores_of_minus_infinity_do_not_make_nan():
    inputs = DECODE_CASES["more splits than pages"].make("cpu", torch.float32, generator())
    inputs["q"].fill_(1e30)
    for row, n in enumerate(inputs["seq_lens"].tolist()):  # half of the keys; the last split's are all among them
        for i in range(n // 2, n):
            inputs["k_cache"][inputs["block_tables"][row, i // 64], :, i % 64] = -1e30
            inputs["k_cache"][inputs["block_tables"][row, (n - 1 - i) // 64], :, (n - 1 - i) % 64] = 0.0
    torch.testing.assert_close(paged_decode(**inputs), OP.reference(**inputs))


@interpreted
def test_a_length_beyond_the_table_counts_as_the_table():
    inputs = paged_cache([64], 1, 16, 16, "cpu", torch.float32, generator())
    inputs["block_tables"] = inputs["block_tables"][:, :4].contiguous()
    q = torch.randn(1, 4, 16)
    long = {**inputs, "seq_lens": torch.tensor([10**9], dtype=torch.int32)}
    assert torch.equal(paged_decode(q, **long), paged_decode(q, **inputs))


@interpreted
def test_offsets_beyond_two_to_the_31_elements():
    """Pages at the end of a cache of 2^31 + elements; the memory between is never touched."""
    size, dim = 256, 64
    num_blocks = 2**31 // (size * dim) + 2
    try:
        data = torch.empty(num_blocks, 1, size, dim, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    assert (num_blocks - 1) * data.stride(0) >= 2**31
    data[-1] = torch.randn(1, size, dim)
    tables = torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    q, lengths = torch.randn(1, 2, dim).half(), torch.tensor([200], dtype=torch.int32)
    expected = OP.reference(q, data[-1:], data[-1:], torch.zeros_like(tables), lengths)
    for run in (paged_decode, lambda *a: EXTEND.triton(*a, torch.tensor([0, 1], dtype=torch.int32))):
        torch.testing.assert_close(run(q, data, data, tables, lengths), expected, rtol=0, atol=1e-3)


def test_references_agree_with_torch_on_unpaged_tensors():
    q, k, v = (torch.randn(2, h, 50, 32, dtype=torch.float64) for h in (4, 2, 2))
    inputs = paged(k, v, [50, 31], 16)
    decode = OP.reference(torch.stack((q[0, :, 49], q[1, :, 30])), **inputs)
    rows = torch.cat((q[0, :, 40:], q[1, :, 28:31]), 1).transpose(0, 1)
    extend = EXTEND.reference(rows, **inputs, cu_seqlens_q=torch.tensor([0, 10, 13], dtype=torch.int32))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(decode, torch.stack((whole[0, :, 49], whole[1, :, 30])))
    torch.testing.assert_close(extend, torch.cat((whole[0, :, 40:], whole[1, :, 28:31]), 1).transpose(0, 1))


# -------------------------------------------------------------------------------------------------------- plan, cost


@pytest.fixture
def h200(monkeypatch):
    device = torch.device("cuda:0")
    monkeypatch.setattr(paged_attention, "sm_count", lambda device: 132)
    monkeypatch.setattr(paged_attention, "shared_limit", lambda device: 232_448)
    monkeypatch.setattr(paged_attention, "fits", lambda needed, device: needed <= 232_448)
    decode_splits.cache_clear()
    yield device
    decode_splits.cache_clear()


def test_splits_fill_the_gpu(h200):
    rows = decode_workspace(32, 8, 128, "cpu").numel() // 130 // 4  # sm_count is the H200's here
    for programs in (*range(1, 1200), 4096):
        splits = decode_splits(h200, programs, 128, 2)
        assert splits == 1 or programs * splits <= rows, "the workspace must be large enough for every batch"
        assert programs * splits >= min(programs * 120, 190), "SMs with less than a program and a half"
    assert decode_splits(h200, 256, 128, 2) == 1  # two programs an SM: one round, no merge
    assert decode_splits(h200, 192, 128, 2) == 2  # 384 programs on 396 places
    assert decode_splits(h200, 512, 128, 2) == 3  # 116 programs would be alone in the second round; now 4 full ones
    assert 30 <= decode_splits(h200, 8, 128, 2) <= 49


@interpreted
def test_the_workspace_is_enough_and_checked():
    inputs = DECODE_CASES["more splits than pages"].make("cpu", torch.float16, generator())
    workspace = torch.full((3 * 4 * 11 * 66,), float("nan"))
    out = paged_decode(**inputs, workspace=workspace)
    assert torch.equal(out, paged_decode(**inputs)) and not workspace.isnan().all()
    with pytest.raises(ValueError, match=r"workspace must hold 8712 float32 on cpu for 11 splits, got 8711"):
        paged_decode(**inputs, workspace=workspace[1:])


def test_costs_count_what_is_seen():
    for case in EXTEND.cases:
        inputs = case.make("cpu", torch.float16, generator())
        bounds, window = inputs["cu_seqlens_q"].tolist(), inputs.get("window") or math.inf
        pairs, read = 0, 0
        for i, length in enumerate(inputs["seq_lens"].tolist()):
            new = bounds[i + 1] - bounds[i]
            seen = [[j for j in range(max(0, p + 1)) if j > p - window] for p in range(length - new, length)]
            pairs += sum(map(len, seen))
            read += len(set().union(*seen))
        heads, dim, kv_heads = *inputs["q"].shape[1:], inputs["k_cache"].shape[1]
        cost = EXTEND.cost(**inputs)
        assert cost.flops == 4 * pairs * heads * dim, case.name
        assert cost.bytes == 2 * 2 * (read * kv_heads * dim + bounds[-1] * heads * dim), case.name
    inputs = DECODE_CASES["window 64"].make("cpu", torch.float16, generator())  # lengths 200, 3, 0, 64, 65
    tokens = 64 + 3 + 0 + 64 + 64
    assert OP.cost(**inputs) == paged_attention.Cost(2 * 2 * tokens * 64 + 2 * 2 * 5 * 4 * 64, 4 * tokens * 4 * 64)


# ---------------------------------------------------------------------------------------------------------- refusals


def _decode_inputs() -> dict:
    return DECODE_CASES["one sequence of one token"].make("cpu", torch.float32, generator())


@pytest.mark.parametrize("op", [OP, EXTEND], ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"q": i["q"][0]}, r"q must have 3 dimensions, got shape \(4, 64\)"),
        (lambda i: {"q": i["q"].double()}, r"k_cache must be torch.float64 like q, got torch.float32"),
        (lambda i: {n: i[n].double() for n in ("q", "k_cache", "v_cache")}, "q must be float32, float16 or bfloat16"),
        (lambda i: {"q": i["q"][:, :, ::2]}, r"q must be contiguous in its last dimension, got strides \(384, 64, 2\)"),
        (lambda i: {"q": i["q"][:, :, :32]}, r"head_dim must be the same in q and k_cache, got \(32, 64\)"),
        (lambda i: {"v_cache": i["v_cache"][:-1]}, r"v_cache must have k_cache's shape, got"),
        (lambda i: {"v_cache": i["v_cache"].half()}, "v_cache must be torch.float32 like q, got torch.float16"),
        (
            lambda i: {n: i[n][:, :, :12] for n in ("k_cache", "v_cache")},
            "block_size must be a power of two .*, got 12",
        ),
        (
            lambda i: {n: i[n].expand(-1, 3, -1, -1) for n in ("k_cache", "v_cache")},
            r"heads must be a multiple of kv_heads, got \(4, 3\)",
        ),
        (lambda i: {"block_tables": i["block_tables"].long()}, "block_tables must be torch.int32, got torch.int64"),
        (lambda i: {"seq_lens": i["seq_lens"].repeat(2)}, "seq_lens must have a row a block table, got 2"),
        (lambda i: {"seq_lens": i["seq_lens"].to("meta")}, "seq_lens must be on q's device cpu, got meta"),
        (lambda i: {"out": i["q"][:, :2]}, r"out must have q's shape, got \(1, 2, 64\)"),
        (lambda i: {"window": 0}, "window must be None or at least 1: a token sees itself, got 0"),
        (lambda i: {"softcap": 0.0}, "softcap must be None or positive, got 0.0"),
    ],
)
def test_bad_input_is_named(op, change, message):
    inputs = _decode_inputs()
    if op is EXTEND:
        inputs["cu_seqlens_q"] = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{op.name}: {message}"):
        op.triton(**{**inputs, **change(inputs)})


def test_input_that_only_one_of_them_refuses():
    inputs = _decode_inputs()
    with pytest.raises(ValueError, match="paged_decode: q must have one token a sequence, got 2 for 1"):
        paged_decode(**{**inputs, "q": inputs["q"].repeat(2, 1, 1)})
    with pytest.raises(ValueError, match="paged_decode: splits must be from 1 to 65535, got 0"):
        paged_decode(**inputs, splits=0)
    with pytest.raises(ValueError, match=r"paged_extend: cu_seqlens_q must be int32 of shape \(2,\) on cpu, got"):
        EXTEND.triton(**inputs, cu_seqlens_q=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="paged_extend: max_q must be None or at least 0, got -1"):
        EXTEND.triton(**inputs, cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), max_q=-1)


def test_a_gpu_that_is_too_small_is_told_the_numbers(h200, monkeypatch):
    for module in (paged_attention, paged_extend):
        monkeypatch.setattr(module, "shared_limit", lambda device: 16384)
        monkeypatch.setattr(module, "fits", lambda needed, device: needed <= 16384)
    with pytest.raises(ValueError, match="paged_decode: head_dim 128 .* 73728 bytes .* has 16384"):
        decode_splits(h200, 8, 128, 2)
    with pytest.raises(ValueError, match="paged_extend: 4 query heads a kv head, of head_dim 128 .* 16384 bytes"):
        paged_extend.block_rows.__wrapped__(h200, 64, 64, 4, 128, 2)


# -------------------------------------------------------------------------------------------------- code generation

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
UNALIGNED = ("splits", "max_blocks", "stride_table", "seqs")


def compiled(kernel, arch, launch: Launch, dtype=torch.bfloat16, head_dim=128, group=4, page=16, **constexprs):
    element = torch.empty(0, dtype=dtype).element_size()
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), TYPES[dtype])
    signature |= {"work_ptr": "*fp32", "table_ptr": "*i32", "length_ptr": "*i32", "bound_ptr": "*i32", "scale": "fp32"}
    fixed = {"GROUP": group, "KV_HEADS": 8, "HEADS": 8 * group, "HEAD_DIM": head_dim, "PAGE": page, "WINDOW": 0}
    fixed |= {"SOFTCAP": 0.0, "BLOCK_N": launch.block_n(block_d, element), "BLOCK_D": block_d, "PRECISION": "ieee"}
    constexprs = {**fixed, "OVERLAP": int(arch[3:]) >= 90, "BLOCK_S": 32, **constexprs}
    names = kernel.arg_names
    signature = {n: signature.get(n, "i32") for n in names if n not in constexprs and not n.isupper()}
    return compile_kernel(
        kernel,
        signature,
        {n: c for n, c in constexprs.items() if n in names},
        arch,
        num_warps=launch.warps(element),
        num_stages=launch.num_stages,
        divisible_by_16=[n for n, t in signature.items() if t != "fp32" and n not in UNALIGNED],
    )


def check_code(code, most_shared: int) -> None:
    assert code.spills == 0 and code.stack_bytes == 0, str(code)
    assert code.shared_bytes <= most_shared, str(code)
    assert code.count("LDGSTS.E.BYPASS.128") == code.count("LDGSTS") > 0, "K and V come by 16-byte asynchronous copies"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_decode_compiles_well(arch):
    code = compiled(paged_attention._decode_kernel, arch, LAUNCH, BLOCK_M=16)
    check_code(code, LAUNCH.shared_bytes(16, 128, 2))
    assert code.count("HMMA") > 0
    if arch == "sm_90":
        assert code.occupancy.blocks >= paged_attention.PER_SM


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64, "group": 7, "page": 256},
        {"head_dim": 80, "group": 24, "BLOCK_M": 32},
        {"head_dim": 256, "group": 8, "page": 1, "WINDOW": 4096},
        {"page": 64, "dtype": torch.float16, "SOFTCAP": 30.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_decode_compiles_well_for_other_shapes(arch, shape):
    shape = {"BLOCK_M": 16, **shape}
    code = compiled(paged_attention._decode_kernel, arch, LAUNCH, **shape)
    block_d = 1 << (shape.get("head_dim", 128) - 1).bit_length()
    check_code(code, LAUNCH.shared_bytes(shape["BLOCK_M"], block_d, 2))
    assert code.count("HMMA") > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_fp32_and_merge_compile(arch):
    code = compiled(paged_attention._decode_kernel, arch, LAUNCH, torch.float32, BLOCK_M=16)
    assert code.spills == 0 and code.count("HMMA") == 0, "fp32 must not be rounded to TF32"
    extend = paged_extend.LAUNCH[16]
    code = compiled(paged_extend._extend_kernel, arch, extend, torch.float32, BLOCK_M=16, SMALL_M=16)
    assert code.spills == 0 and code.count("HMMA") == 0
    merge = compiled(paged_attention._merge_kernel, arch, LAUNCH)
    assert merge.spills == 0 and merge.count("LDG.E.128") > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("rows", paged_extend.LAUNCH)
def test_extend_compiles_well(arch, rows):
    code = compiled(paged_extend._extend_kernel, arch, paged_extend.LAUNCH[rows], BLOCK_M=rows, SMALL_M=16)
    check_code(code, paged_extend.shared_bytes(rows, 128, 2))
    tensor_core = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(arch, "HMMA") if rows >= 64 else "HMMA"
    assert code.count(tensor_core) > 0


# --------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 16, 64, 256])
@pytest.mark.parametrize("splits", [None, 1, 2, 7])
def test_long_sequences_on_the_gpu(size, splits):
    inputs = paged_cache([5000, 1, 0, 777, 2048], 8, 128, size, "cuda", torch.bfloat16, generator())
    q = torch.randn(5, 32, 128, device="cuda", dtype=torch.bfloat16)
    exact = OP.reference(q.double(), **{k: v.double() if v.dtype == q.dtype else v for k, v in inputs.items()})
    rounding = (OP.reference(q, **inputs).double() - exact).abs().max()
    runs = [paged_decode(q, **inputs, splits=splits) for _ in range(20)]
    assert (runs[0].double() - exact).abs().max() <= 2 * rounding + 1e-3
    assert all(torch.equal(runs[0], run) for run in runs), "the same inputs gave different bits"


@pytest.mark.gpu
def test_a_captured_call_follows_the_lengths():
    inputs = paged_cache([4000, 4000], 8, 128, 16, "cuda", torch.bfloat16, generator())
    q = torch.randn(2, 32, 128, device="cuda", dtype=torch.bfloat16)
    out, work = torch.empty_like(q), decode_workspace(32, 8, 128, "cuda")
    bounds = torch.arange(3, dtype=torch.int32, device="cuda")
    other = torch.empty_like(q)
    for run in (True, False):  # compile first, then capture
        graph = torch.cuda.CUDAGraph()
        context = torch.cuda.stream(torch.cuda.Stream()) if run else torch.cuda.graph(graph)
        with context:
            paged_decode(q, **inputs, out=out, workspace=work)
            EXTEND.triton(q, **inputs, cu_seqlens_q=bounds, max_q=1, out=other)
        torch.cuda.synchronize()
    for lengths in ([4000, 1], [0, 33], [129, 3999]):
        inputs["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        other.fill_(float("nan"))
        graph.replay()
        expected = OP.reference(q, **inputs)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(other, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31_elements_on_the_gpu():
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    num_blocks = 2**31 // (2 * 8 * 16 * 128) + 2
    cache = torch.empty(num_blocks, 2, 8, 16, 128, device="cuda", dtype=torch.bfloat16).fill_(float("nan"))
    cache[-2:] = torch.randn(2, 2, 8, 16, 128, device="cuda")
    tables = torch.tensor([[num_blocks - 1, num_blocks - 2]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([30], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    expected = OP.reference(q, cache[-2:, 0], cache[-2:, 1], tables - (num_blocks - 2), lengths)
    bounds = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    args = (q, cache[:, 0], cache[:, 1], tables, lengths)
    torch.testing.assert_close(paged_decode(*args), expected, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(EXTEND.triton(*args, bounds), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
def test_more_sequences_than_a_grid_dimension_of_65535():
    seqs = 70_000
    cache = torch.randn(2, 1, 16, 64, device="cuda", dtype=torch.float16)
    tables = (torch.arange(seqs, device="cuda") % 2).int()[:, None]
    lengths = torch.ones(seqs, dtype=torch.int32, device="cuda")
    q = torch.randn(seqs, 2, 64, device="cuda", dtype=torch.float16)
    expected = cache[tables[:, 0].long(), 0, 0][:, None].expand_as(q)  # one token: the output is its value
    bounds = torch.arange(seqs + 1, dtype=torch.int32, device="cuda")
    assert torch.equal(paged_decode(q, cache, cache, tables, lengths), expected)
    assert torch.equal(EXTEND.triton(q, cache, cache, tables, lengths, bounds, max_q=1), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("news", [[512, 1, 1, 0, 700], [2048], [4] * 9])
def test_mixed_steps_on_the_gpu(news):
    lengths = [n + 1000 for n in news]
    inputs = paged_cache(lengths, 8, 128, 16, "cuda", torch.bfloat16, generator())
    q = torch.randn(sum(news), 32, 128, device="cuda", dtype=torch.bfloat16)
    inputs["cu_seqlens_q"] = torch.tensor([0, *news]).cumsum(0).int().cuda()
    exact = EXTEND.reference(q.double(), **{k: v.double() if v.dtype == q.dtype else v for k, v in inputs.items()})
    rounding = (EXTEND.reference(q, **inputs).double() - exact).abs().max()
    for max_q in (None, max(news)):
        got = EXTEND.triton(q, **inputs, max_q=max_q)
        assert (got.double() - exact).abs().max() <= 2 * rounding + 2e-3
        assert torch.equal(got, EXTEND.triton(q, **inputs, max_q=max_q))


def _debug_inputs():
    cache = torch.zeros(4, 1, 16, 64)
    table = torch.tensor([[1, 2], [3, 99]], dtype=torch.int32)
    return {"k_cache": cache, "v_cache": cache, "block_tables": table}


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([32, 17], r"block_tables\[1\] must hold ids from 0 to 3, got 99"),
        ([33, 1], r"seq_lens\[0\] must be from 0 to 2 blocks x 16 = 32, got 33"),
        ([-1, 1], r"seq_lens\[0\] must be from 0 to 2 blocks x 16 = 32, got -1"),
    ],
)
def test_debug_mode_refuses_what_reads_foreign_memory(lengths, message):
    inputs = _debug_inputs() | {"seq_lens": torch.tensor(lengths, dtype=torch.int32)}
    q = torch.zeros(2, 1, 64)
    with pytest.raises(ValueError, match="paged_decode: " + message):
        paged_decode(q, **inputs, debug=True)
    with pytest.raises(ValueError, match="paged_extend: " + message):
        paged_extend.paged_extend(q, **inputs, cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32), debug=True)


def test_debug_mode_lets_ids_past_a_sequence_s_end_be():
    inputs = _debug_inputs() | {"seq_lens": torch.tensor([32, 16], dtype=torch.int32)}
    assert paged_decode(torch.zeros(2, 1, 64), **inputs, debug=True).shape == (2, 1, 64)
