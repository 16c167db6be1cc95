"""rope beyond the operator test: the angles, what must not be touched, errors, compiled code."""

from __future__ import annotations

import pytest
import torch

from kernels.rope import _VARYING, LAUNCH, OP, Cost, _rope_kernel, rope_table
from labkit.measure.compile import ARCHITECTURES, compile_kernel

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreter")
INV_FREQ = 10_000.0 ** -(torch.arange(0, 8, 2).float() / 8)


def _inputs(tokens=3, heads=4, kv_heads=2, head_dim=8, **change):
    q, k = torch.randn(tokens, heads, head_dim), torch.randn(tokens, kv_heads, head_dim)
    return {"q": q, "k": k, "positions": torch.arange(tokens), "table": rope_table(INV_FREQ, 16), **change}


def test_the_table_holds_fp32_angles():
    table = rope_table(INV_FREQ, 2**17 + 2)
    exact = (2**17 + 1) * INV_FREQ.double()  # bf16 would round this position by up to 512
    torch.testing.assert_close(table[-1, :4].double(), exact.cos(), rtol=0, atol=2**-7)
    torch.testing.assert_close(table[-1, 4:].double(), exact.sin(), rtol=0, atol=2**-7)
    assert table[-1, 0] == torch.tensor(2.0**17 + 1).cos()  # frequency 1: the product is exact
    assert table.dtype == torch.float32 and table.shape == (2**17 + 2, 8)


@ON_CPU
def test_turning_is_a_rotation_of_pairs():
    """q . k depends on the difference of their positions alone, and position 0 changes nothing."""
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    table = rope_table(INV_FREQ, 64)

    def product(at_q, at_k):
        a, _ = OP.triton(q.clone(), q.clone(), torch.tensor([at_q]), table)
        _, b = OP.triton(k.clone(), k.clone(), torch.tensor([at_k]), table)
        return (a * b).sum()

    torch.testing.assert_close(product(5, 2), product(60, 57))
    assert (product(5, 2) - product(5, 3)).abs() > 1e-3
    same, _ = OP.triton(q.clone(), k.clone(), torch.tensor([0]), table)
    assert torch.equal(same, q)


@ON_CPU
def test_pairs_are_first_half_with_second_half():
    q = torch.zeros(1, 1, 8)
    q[0, 0, 1] = 1.0
    OP.triton(q, torch.zeros(1, 1, 8), torch.tensor([3]), rope_table(INV_FREQ, 4))
    assert q[0, 0].nonzero().flatten().tolist() == [1, 5]
    torch.testing.assert_close(q[0, 0, 1], (3 * INV_FREQ[1]).cos())
    torch.testing.assert_close(q[0, 0, 5], (3 * INV_FREQ[1]).sin())


@ON_CPU
def test_neither_values_nor_unturned_elements_are_touched():
    qkv = torch.randn(4, 5, 16)
    before = qkv.clone()
    q, k = qkv[:, :3], qkv[:, 3:4]
    got = OP.triton(q, k, torch.tensor([9, 9, 0, 2]), rope_table(INV_FREQ, 10))
    assert got[0] is q and got[1] is k
    assert torch.equal(qkv[:, 4], before[:, 4]) and torch.equal(qkv[..., 8:], before[..., 8:])
    assert not torch.equal(qkv[:2, :4, :8], before[:2, :4, :8])


def _far(*shape: int) -> torch.Tensor:
    """Random fp16 whose first dimension has stride 2^30: the third row starts past 2^31. Only touched pages cost."""
    inner = torch.empty(shape[1:]).stride()
    view = torch.empty(2**31 + 2**20, dtype=torch.float16).as_strided(shape, (2**30, *inner))
    return view.copy_(torch.randn(shape))


@ON_CPU
def test_offsets_past_two_to_the_31_on_a_cpu():
    inputs = _inputs(q=_far(3, 4, 8), k=_far(3, 2, 8))
    expected = OP.reference(**{name: t.clone() for name, t in inputs.items()})
    for got, wanted in zip(OP.triton(**inputs), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@ON_CPU
def test_debug_refuses_positions_outside_the_table():
    for at in ([0, 1, 16], [-1, 0, 1]):
        with pytest.raises(
            ValueError, match=rf"rope: positions run from {min(at)} to {max(at)}, the table holds 0 to 15"
        ):
            OP.triton(**_inputs(positions=torch.tensor(at)), debug=True)
    OP.triton(**_inputs(positions=torch.tensor([15, 0, 3])), debug=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 32)}, r"q must be \[tokens, heads, head_dim\], got shape \(3, 32\)"),
        ({"k": torch.zeros(2, 2, 8)}, r"k must have q's tokens, head_dim and dtype; q is \(3, 4, 8\)"),
        ({"k": torch.zeros(3, 2, 8).half()}, r"k must have q's tokens, head_dim and dtype"),
        ({"q": torch.zeros(3, 8, 4).transpose(1, 2)}, r"q's last dimension must be contiguous .* got stride 4"),
        ({"k": torch.zeros(3, 2, 8).double()}, r"k must be float32, float16 or bfloat16, got torch\.float64"),
        ({"positions": torch.zeros(3)}, r"positions must be contiguous int32 or int64 \[3\], got torch\.float32"),
        ({"positions": torch.arange(4)}, r"positions must be contiguous int32 or int64 \[3\], got .* \[4\]"),
        ({"positions": torch.arange(6)[::2]}, r"positions must be contiguous .* strides \(2,\)"),
        ({"table": torch.zeros(16, 7)}, r"table must be contiguous float32 .* even rope_dim"),
        ({"table": torch.zeros(16, 8).half()}, r"table must be contiguous float32"),
        ({"table": torch.zeros(16, 10)}, r"table turns 10 elements of a head, but head_dim is 8"),
        ({"table": torch.zeros(16, 8, device="meta")}, r"table must be on q's device cpu, got meta"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=f"^rope: {message}"):
        OP.triton(**_inputs(**change))


def test_cost():
    inputs = _inputs()  # 3 tokens of 6 heads, 8 elements turned; 3 int64 positions; 3 rows of 8 fp32
    assert OP.cost(**inputs) == Cost(bytes=2 * 144 * 4 + 3 * 8 + 3 * 8 * 4, flops=3 * 144)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "size", "half"), [("bf16", 2, 64), ("fp16", 2, 32), ("fp32", 4, 64)])
def test_compiled_code(arch, dtype, size, half):
    signature = {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "positions_ptr": "*i64", "table_ptr": "*fp32"}
    rows = LAUNCH.block_bytes // (half * size)
    c = compile_kernel(
        _rope_kernel, {**signature, **dict.fromkeys(_VARYING, "i32")},
        {"VEC": 16 // size, "TOKENS": LAUNCH.tokens, "HEADS": rows // LAUNCH.tokens, "HALF": half},
        arch, num_warps=LAUNCH.num_warps, divisible_by_16=list(signature),
    )  # fmt: skip
    assert c.spills == c.stack_bytes == c.shared_bytes == 0, str(c)  # no detour through shared memory either
    assert c.count("LDG.128") == c.count("LDG") - 1 and c.count("STG.128") == c.count("STG") == 2, c.stats.summary()


@pytest.mark.gpu
def test_offsets_past_two_to_the_31():
    tokens, heads = 2**19 + 1, 33  # q has 2^31 + 2^26 elements
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    qk = torch.empty(tokens, heads, 128, device="cuda", dtype=torch.bfloat16).uniform_(-1, 1)
    positions = torch.arange(tokens, device="cuda") % 1000
    table = rope_table(10_000.0 ** -(torch.arange(0, 128, 2, device="cuda").float() / 128), 1000)
    last = qk[-3:].clone()
    OP.triton(qk[:, :32], qk[:, 32:], positions, table)
    OP.reference(last[:, :32], last[:, 32:], positions[-3:], table)
    torch.testing.assert_close(qk[-3:], last, rtol=2**-7, atol=1e-3)
