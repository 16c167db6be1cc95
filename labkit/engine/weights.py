"""Weights in the layout the model multiplies by, from a Hugging Face folder or drawn at random.

A checkpoint stores q, k and v (and gate and up) as separate matrices. Each set reads the same input, so it is stacked
into one matrix here: one product instead of three, and one launch. Files are read by memory map, and every tensor is
copied once, straight to its place and dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from labkit.engine.config import ModelConfig
from labkit.errors import LabError


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in], as in ``torch.nn.functional.linear``."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [q_size + 2 * kv_size, hidden], rows: all query heads, all key heads, all value heads
    qkv_bias: torch.Tensor | None  # [q_size + 2 * kv_size]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    attn_out: torch.Tensor  # [hidden, q_size]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden], rows: gate, then up
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]; the embedding itself in a tied model


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor a Hugging Face checkpoint of this shape holds."""
    c, shapes = config, {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = (c.hidden_size,)
        for name, rows in (("q", c.q_size), ("k", c.kv_size), ("v", c.kv_size)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (rows, c.hidden_size)
            if c.qkv_bias:
                shapes[f"{p}self_attn.{name}_proj.bias"] = (rows,)
        if c.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (c.head_dim,)
        shapes[p + "self_attn.o_proj.weight"] = (c.hidden_size, c.q_size)
        shapes[p + "post_attention_layernorm.weight"] = (c.hidden_size,)
        shapes[p + "mlp.gate_proj.weight"] = shapes[p + "mlp.up_proj.weight"] = (c.intermediate_size, c.hidden_size)
        shapes[p + "mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def load_weights(folder: Path, config: ModelConfig, dtype=torch.float32, device="cpu") -> Weights:
    """Read ``folder``'s safetensors: those its index lists, or model.safetensors.

    Raises LabError naming the file that is damaged or the tensor that is missing, unexpected, or of another shape.
    """
    shapes, where = tensor_shapes(config), {}
    for path in _files(folder):
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise LabError(f"{path} is no readable safetensors file ({error}); it may be incomplete") from error
        where |= dict.fromkeys(file.keys(), file)
    if missing := [name for name in shapes if name not in where]:
        raise LabError(f"{folder} lacks the tensor {missing[0]}{_and_more(missing)}, which its config.json asks for")
    # Two kinds of spare tensor are harmless: a tied model's second copy, and old checkpoints' rotary tables.
    spare = [n for n in where if n not in shapes and n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")]
    if spare:
        raise LabError(f"{folder} holds the tensor {spare[0]}{_and_more(spare)}, which its config.json has no use for")
    for name, shape in shapes.items():
        got = tuple(where[name].get_slice(name).get_shape())
        if got != shape:
            raise LabError(f"{folder}: the tensor {name} has shape {got}, and its config.json asks for {shape}")
    return assemble(config, lambda name, out: out.copy_(where[name].get_tensor(name)), dtype, device)


def random_weights(config: ModelConfig, dtype=torch.float32, device="cpu", seed: int = 0) -> Weights:
    """Normal weights of standard deviation 0.02, norms at 1, biases at 0: real sizes for a benchmark, made in place.

    The same seed gives the same weights on one kind of device; CPU and CUDA draw different numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, out: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            out.fill_(1.0)
        elif name.endswith(".bias"):
            out.zero_()
        else:
            out.normal_(0.0, 0.02, generator=generator)

    return assemble(config, fill, dtype, device)


def assemble(config: ModelConfig, fill: Callable[[str, torch.Tensor], object], dtype, device) -> Weights:
    """Allocate every matrix in its final layout and let ``fill(name, out)`` write each checkpoint tensor into it."""
    shapes = tensor_shapes(config)

    def one(name: str) -> torch.Tensor:
        out = torch.empty(shapes[name], dtype=dtype, device=device)
        fill(name, out)
        return out

    def stack(*names: str) -> torch.Tensor:
        rows = [shapes[name][0] for name in names]
        out = torch.empty((sum(rows), *shapes[names[0]][1:]), dtype=dtype, device=device)
        for name, part in zip(names, out.split(rows), strict=True):
            fill(name, part)
        return out

    layers = []
    for i in range(config.num_layers):
        p = f"model.layers.{i}."
        qkv = [f"{p}self_attn.{n}_proj" for n in "qkv"]
        layers.append(
            LayerWeights(
                attn_norm=one(p + "input_layernorm.weight"),
                qkv=stack(*(n + ".weight" for n in qkv)),
                qkv_bias=stack(*(n + ".bias" for n in qkv)) if config.qkv_bias else None,
                q_norm=one(p + "self_attn.q_norm.weight") if config.qk_norm else None,
                k_norm=one(p + "self_attn.k_norm.weight") if config.qk_norm else None,
                attn_out=one(p + "self_attn.o_proj.weight"),
                mlp_norm=one(p + "post_attention_layernorm.weight"),
                gate_up=stack(p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"),
                down=one(p + "mlp.down_proj.weight"),
            )
        )
    embedding = one("model.embed_tokens.weight")
    lm_head = embedding if config.tie_embeddings else one("lm_head.weight")
    return Weights(embedding, layers, one("model.norm.weight"), lm_head)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LabError(f"{index} is no safetensors index ({error!r})") from error
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).exists():
            raise LabError(f"{folder} has no {name}, where its weights should be")
    return [folder / name for name in names]


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
