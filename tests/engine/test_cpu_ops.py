"""The engine's CPU operators pass the test that kernels pass, over the same hostile inputs."""

from dataclasses import replace

import pytest
import torch

from labkit.engine import MODELS
from labkit.engine.cpu_ops import CpuOps, column_major
from labkit.engine.ops import KERNELS, NAMES, resolve_ops
from labkit.engine.weights import random_weights
from labkit.errors import LabError
from tests.kernels.harness import compare

RUNS = [
    pytest.param(op, case, dtype, id=f"{op.name}-{str(dtype)[6:]}-{case.name}")
    for op in KERNELS.values()
    for dtype in op.dtypes
    for case in op.cases
]


@pytest.mark.parametrize(("op", "case", "dtype"), RUNS)
def test_cpu_operator_gives_what_the_definition_gives(op, case, dtype, monkeypatch):
    cpu = CpuOps()
    compare(replace(op, triton=getattr(cpu, op.name)), case, dtype, "cpu", monkeypatch)


@pytest.mark.parametrize("op", KERNELS.values(), ids=KERNELS)
def test_what_a_step_keeps_serves_its_second_layer(op, monkeypatch):
    """Within a step the same call twice, with other values in the cache: the second must not see the first's."""
    cpu = CpuOps()
    fn = getattr(cpu, op.name)

    def twice(**inputs):
        cpu.begin()
        try:
            fn(**{k: v.clone() if k in op.mutates + ("q", "x") else v for k, v in inputs.items()})
            return fn(**inputs)
        finally:
            cpu.end()

    for case in op.cases:
        compare(replace(op, triton=twice), case, torch.float32, "cpu", monkeypatch)


def test_a_new_step_forgets_the_last_ones_positions():
    cpu = CpuOps()
    rope = KERNELS["rope"]
    for position, in_a_step in ((3, True), (7, True), (5, False), (2, False)):
        inputs = rope.cases[1].make("cpu", torch.float32, torch.Generator().manual_seed(0))
        inputs |= dict(positions=torch.tensor([position]), table=torch.rand(8, 2))
        want = rope.reference(**{k: v.clone() for k, v in inputs.items()})
        if in_a_step:
            cpu.begin()
        got = cpu.rope(**inputs)
        if in_a_step:
            cpu.end()
        assert torch.allclose(got[0], want[0]) and torch.allclose(got[1], want[1])


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_by_columns_are_the_same_matrices(tied):
    config = replace(MODELS["smollm2-135m"], num_layers=2, vocab_size=50, hidden_size=48, tie_embeddings=tied)
    weights, before = random_weights(config), random_weights(config)
    column_major(weights)
    for layer, old in zip(weights.layers, before.layers, strict=True):
        for name in ("qkv", "attn_out", "gate_up", "down"):
            assert getattr(layer, name).stride(0) == 1 and torch.equal(getattr(layer, name), getattr(old, name))
    assert weights.embedding.is_contiguous() and torch.equal(weights.embedding, before.embedding)
    assert torch.equal(weights.lm_head, before.lm_head) and (weights.lm_head is weights.embedding) == tied
    held = [layer.down for layer in weights.layers]
    column_major(weights)
    assert all(layer.down is old for layer, old in zip(weights.layers, held, strict=True)), "nothing is left to do"


def test_lengths_that_differ_much_are_attended_to_in_groups():
    """1 sequence of 512 tokens and 7 of 1: padded to the longest they would be 4096 tokens."""
    from labkit.engine import cpu_ops

    tables = torch.arange(8 * 32, dtype=torch.int32).view(8, 32)
    lengths = torch.tensor([512] + [1] * 7, dtype=torch.int32)
    groups = cpu_ops._groups(range(8), tables, lengths, torch.zeros(256, 1, 16, 4))
    assert sorted(sum((seqs for seqs, _ in groups), [])) == list(range(8))
    assert sum(len(rows.index) for _, rows in groups) == 512 + 7


def test_the_defaults_are_the_devices_and_own_functions_take_their_place():
    def mine(x):
        return x

    ops, cpu = resolve_ops({"silu_mul": mine}, torch.device("cpu"))
    assert set(ops) == set(NAMES) and ops["silu_mul"].__wrapped__ is mine and ops["rope"] == cpu.rope
    ops, cpu = resolve_ops(None, torch.device("cuda"))
    assert cpu is None and all(ops[name] is op.triton for name, op in KERNELS.items())


def test_unknown_operators_are_refused_with_the_names_there_are():
    with pytest.raises(LabError, match="no operator 'rmsnorm' to replace; the names are linear, rms_norm, add_rms"):
        resolve_ops({"rmsnorm": len}, torch.device("cpu"))
    with pytest.raises(LabError, match=r"ops\['rope'\] must be a function with the operator's signature, got 3"):
        resolve_ops({"rope": 3}, torch.device("cpu"))
