"""Block types of GGUF files, decoded value by value from their definition, and read into a model at their place.

A block is decoded here with plain Python integers, bit by bit: neither the engine's way nor the gguf package's.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from labkit.engine import gguf as convert
from labkit.engine import load
from labkit.engine.gguf import LAYER_NAMES
from labkit.errors import LabError
from tests.engine.tiny_models import VOCABULARY, left_over, tiny_hf, write_gguf

Type = gguf.GGMLQuantizationType


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def q4_1(b: bytes) -> list[float]:
    """fp16 d, fp16 m, 16 bytes: value i < 16 in the low, value i + 16 in the high nibble of byte i; d q + m."""
    d, m, codes = half(b[:2]), half(b[2:4]), b[4:]
    return [d * q + m for q in [c & 15 for c in codes] + [c >> 4 for c in codes]]


def q8_0(b: bytes) -> list[float]:
    """fp16 d, 32 signed bytes; d q."""
    return [half(b[:2]) * q for q in np.frombuffer(b[2:], np.int8).tolist()]


def q4_k(b: bytes) -> list[float]:
    """fp16 d, fp16 dmin, 12 bytes of 6-bit scales and minima for 8 groups of 32, 128 bytes of codes; d s q - dmin m.

    Groups 2j and 2j + 1 share 32 bytes, low nibbles and high. Scales 0 to 3 are the low 6 bits of bytes 0 to 3, minima
    those of bytes 4 to 7; of groups 4 to 7 bytes 8 to 11 hold the low 4 bits (scale low, minimum high), and their upper
    2 bits are the upper 2 of bytes 0 to 3 and 4 to 7.
    """
    d, dmin, packed, codes = half(b[:2]), half(b[2:4]), b[4:16], b[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, low = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            low = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        shift = 4 * (group % 2)
        for c in codes[32 * (group // 2) : 32 * (group // 2) + 32]:
            values.append(d * scale * (c >> shift & 15) - dmin * low)
    return values


def q6_k(b: bytes) -> list[float]:
    """128 bytes of low nibbles, 64 of upper 2 bits, 16 signed scales for groups of 16, fp16 d; d s (q - 32).

    Of each half of 128 values, value 32 k + i has its low bits in byte 32 (k % 2) + i of the half's 64, nibble k // 2,
    and its upper bits in byte i of the half's 32, at bit 2 k.
    """
    low, high, scales, d = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8).tolist(), half(b[208:])
    values = []
    for n in range(256):
        part, k, i = n // 128, n % 128 // 32, n % 32
        q = low[64 * part + 32 * (k % 2) + i] >> 4 * (k // 2) & 15 | (high[32 * part + i] >> 2 * k & 3) << 4
        values.append(d * scales[n // 16] * (q - 32))
    return values


DECODERS = {Type.Q4_1: q4_1, Type.Q8_0: q8_0, Type.Q4_K: q4_k, Type.Q6_K: q6_k}
HALVES = {Type.Q4_1: (0, 2), Type.Q8_0: (0,), Type.Q4_K: (0, 2), Type.Q6_K: (208,)}  # where a block's fp16 numbers lie
TYPICAL = {Type.Q4_1: 0.02, Type.Q8_0: 0.002, Type.Q4_K: 0.0005, Type.Q6_K: 0.0001}


def random_blocks(kind: Type, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes]: every bit of codes and scales at random, fp16 numbers that give weights below 1."""
    rng = np.random.default_rng([seed, kind])
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // values, size), np.uint8)
    for at in HALVES[kind]:
        numbers = (TYPICAL[kind] * rng.uniform(-1, 1, len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = numbers[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def decoded(kind: Type, blocks: np.ndarray) -> np.ndarray:
    """fp32 [rows, columns], by this file's decoders."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    flat = [
        v for row in blocks for at in range(0, len(row), size) for v in DECODERS[kind](row[at : at + size].tobytes())
    ]
    return np.array(flat, np.float32).reshape(len(blocks), -1)


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_the_definition_is_what_the_package_decodes(kind):
    blocks = random_blocks(kind, 3, 512)
    want = gguf.dequantize(blocks, kind)
    assert want.shape == (3, 512) and np.abs(want).max() > 0.05
    np.testing.assert_allclose(decoded(kind, blocks), want, rtol=1e-5, atol=1e-7)


SHAPE = dict(hidden_size=256, intermediate_size=256, head_dim=32, num_attention_heads=8, num_key_value_heads=2)
Q4_K_M = {name: Type.Q6_K if name in ("attn_v.weight", "ffn_down.weight") else Type.Q4_K for name in LAYER_NAMES}
MIXES = {
    "Q4_1": dict.fromkeys(LAYER_NAMES, Type.Q4_1) | {"token_embd.weight": Type.Q4_1},
    "Q8_0": dict.fromkeys(LAYER_NAMES, Type.Q8_0) | {"token_embd.weight": Type.Q8_0},
    "Q4_K": dict.fromkeys(LAYER_NAMES, Type.Q4_K) | {"token_embd.weight": Type.Q4_K},
    "Q6_K": dict.fromkeys(LAYER_NAMES, Type.Q6_K) | {"token_embd.weight": Type.Q6_K},
    "Q4_K_M": Q4_K_M | {"token_embd.weight": Type.Q6_K},  # types by tensor, as such files have them
}


def file_of(mix: str, family: str, path) -> tuple[dict[str, np.ndarray], object]:
    """A GGUF file whose matrices are random blocks -> ({name in the file: its raw blocks}, the config)."""
    kinds = MIXES[mix]
    original = tiny_hf(family, **SHAPE, tie_word_embeddings=True)
    c = original.config
    widths = {"attn_q": 256, "attn_k": 64, "attn_v": 64, "attn_output": 256, "ffn_gate": 256, "ffn_up": 256}
    extra = {"token_embd.weight": (len(VOCABULARY), kinds["token_embd.weight"])}
    for block in range(c.num_hidden_layers):
        for name, rows in (*widths.items(), ("ffn_down", 256)):
            extra[f"blk.{block}.{name}.weight"] = (rows, kinds[f"{name}.weight"])
    extra = {
        name: (random_blocks(kind, rows, 256, seed=i), kind) for i, (name, (rows, kind)) in enumerate(extra.items())
    }
    write_gguf(path, original, skip=list(extra), extra=extra)
    return extra, original


def in_model_order(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp's row 2 i + half of a head is the model's row half * head_dim / 2 + i."""
    out = np.empty_like(rows)
    for head in range(0, len(rows), head_dim):
        for i in range(head_dim // 2):
            for part in (0, 1):
                out[head + part * head_dim // 2 + i] = rows[head + 2 * i + part]
    return out


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_matrix_is_what_its_blocks_stand_for(mix, family, tmp_path, own_home):
    blocks, original = file_of(mix, family, tmp_path / "tiny.gguf")
    model, _ = load(tmp_path / "tiny.gguf", progress=None)
    values = {name: gguf.dequantize(raw, kind).astype(np.float32) for name, (raw, kind) in blocks.items()}
    if family == "llama":
        for name in values:
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                values[name] = in_model_order(values[name], 32)
    w = model.weights
    assert torch.equal(w.embedding, torch.from_numpy(values["token_embd.weight"])) and w.lm_head is w.embedding
    for i, layer in enumerate(w.layers):
        mine = {name: torch.from_numpy(values[f"blk.{i}.{name}.weight"]) for name in
                ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}  # fmt: skip
        assert torch.equal(layer.qkv, torch.cat([mine["attn_q"], mine["attn_k"], mine["attn_v"]]))
        assert torch.equal(layer.attn_out, mine["attn_output"])
        assert torch.equal(layer.gate_up, torch.cat([mine["ffn_gate"], mine["ffn_up"]]))
        assert torch.equal(layer.down, mine["ffn_down"])
    logits = model.forward(torch.arange(2, 22)[None], torch.arange(20))
    assert logits.isfinite().all() and logits.std() > 0


# ---- types that cannot be read


@pytest.mark.parametrize("kind", [Type.Q8_K, Type.Q8_1, Type.I8], ids=lambda kind: kind.name)
def test_a_type_without_a_decoder_is_named(kind, tmp_path, own_home):
    values, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((256, 256 // values * size), np.uint8 if size > 1 else np.int8)
    name = "blk.1.ffn_down.weight"
    write_gguf(tmp_path / "bad.gguf", tiny_hf("llama", **SHAPE), skip=[name], extra={name: (data, kind)})
    with pytest.raises(LabError, match=f"bad.gguf: the tensor {name} has the unsupported type {kind.name}$") as error:
        load(tmp_path / "bad.gguf", progress=None)
    assert "\n" not in str(error.value) and left_over(own_home) == []


def test_a_type_from_the_future_is_not_called_damage(tmp_path, own_home):
    path = write_gguf(tmp_path / "new.gguf", tiny_hf("llama"))
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # after the name: the number of dimensions, and one dimension
    assert data[at : at + 4] == int(Type.F32).to_bytes(4, "little")
    data[at : at + 4] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(LabError, match="new.gguf holds a tensor of type 99, which the installed gguf package .* know"):
        load(path, progress=None)
    with pytest.raises(LabError, match="type 99"):
        convert.open_gguf(path)
    assert left_over(own_home) == []


def test_blocks_cut_at_the_end_of_the_file_are_damage(tmp_path, own_home):
    file_of("Q4_K", "llama", tmp_path / "cut.gguf")
    data = (tmp_path / "cut.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-200])
    with pytest.raises(LabError, match="cut.gguf is truncated or damaged"):
        load(tmp_path / "cut.gguf", progress=None)
    assert left_over(own_home) == []
