"""Weights in the layout the model multiplies by, from a Hugging Face folder or drawn at random.

A checkpoint stores q, k and v (and gate and up) as separate matrices. Each set reads the same input, so it is stacked
into one matrix here: one product instead of three, and one launch. Files are read by memory map, and every tensor is
copied once, straight to its place and dtype; to a GPU through page-locked buffers (staging.py).

A layer's four products may be packed: integers of 2 to 8 bits with a scale for each group, multiplied as they are (see
packed.py). The embedding and the output head are plain always, as in AWQ checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from kernels.awq_linear import PackedWeight, awq_linear
from labkit.engine.config import ModelConfig
from labkit.engine.safetensors_file import weight_files
from labkit.engine.staging import Stager
from labkit.errors import LabError
from labkit.quant.blocks import PRODUCTS
from labkit.quant.checkpoint import enter

Product = torch.Tensor | PackedWeight
#: (the names of the checkpoint tensors that a product stacks, a function that makes the plain matrix) -> the product
Packing = Callable[[tuple[str, ...], Callable[[], torch.Tensor]], Product]
FLOATS = ("F16", "BF16", "F32", "F64")  # the dtypes that plain weights may have, as safetensors names them


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in], as in ``torch.nn.functional.linear``."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: Product  # [q_size + 2 * kv_size, hidden], rows: all query heads, all key heads, all value heads
    qkv_bias: torch.Tensor | None  # [q_size + 2 * kv_size]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    attn_out: Product  # [hidden, q_size]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Product  # [2 * intermediate, hidden], rows: gate, then up
    down: Product  # [hidden, intermediate]


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]; the embedding itself in a tied model

    @property
    def packed(self) -> bool:
        """Whether every product of every layer is packed."""
        return all(isinstance(getattr(layer, name), PackedWeight) for layer in self.layers for name in PRODUCTS)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it; what a tied model has once is counted once."""
        held = [self.embedding, self.final_norm, *([] if self.lm_head is self.embedding else [self.lm_head])]
        held += [t for layer in self.layers for f in fields(layer) if (t := getattr(layer, f.name)) is not None]
        return sum(t.nbytes for t in held)


def multiply(x: torch.Tensor, weight: Product, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [n, in], weight: [out, in], plain or packed -> [n, out].

    On a CPU a packed weight becomes what its codes stand for, in x's dtype, anew in every call: so the result is that
    of the same weights loaded dequantised, and it takes long (SmolLM2, fp32, one core: 1.3 s a token instead of 0.07).
    To keep the matrix would take the memory that packing is there to save; where memory does not matter, the same
    checkpoint can be loaded without packing.
    """
    if not isinstance(weight, PackedWeight):
        return F.linear(x, weight, bias)
    if x.is_cuda:
        return awq_linear(x, weight, bias=bias)
    return F.linear(x, weight.dequantise(x.dtype), bias)


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

    Raises LabError naming the file that is damaged or the tensor that is missing, unexpected, in two files, or of
    another shape or kind.
    """
    shapes, where, held = tensor_shapes(config), {}, {}
    for path in weight_files(folder):
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise LabError(f"{path} is no readable safetensors file ({error}); it may be incomplete") from error
        enter(held, path, file.keys())
        where |= dict.fromkeys(file.keys(), file)
    if missing := [name for name in shapes if name not in where]:
        raise LabError(f"{folder} lacks the tensor {missing[0]}{_and_more(missing)}, which its config.json asks for")
    # Two kinds of spare tensor are harmless: a tied model's second copy, and old checkpoints' rotary tables.
    spare = [n for n in where if n not in shapes and n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")]
    if spare:
        raise LabError(f"{folder} holds the tensor {spare[0]}{_and_more(spare)}, which its config.json has no use for")
    for name, shape in shapes.items():
        found = where[name].get_slice(name)
        if (got := tuple(found.get_shape())) != shape:
            raise LabError(f"{folder}: the tensor {name} has shape {got}, and its config.json asks for {shape}")
        check_float(folder, name, found.get_dtype())
    copy = copier(device)
    return assemble(config, lambda name, out: copy(where[name].get_tensor(name), out), dtype, device)


def check_float(folder: Path, name: str, dtype: str) -> None:
    """Raises LabError for a plain weight that is no floating number, or one of 8 bits, whose scale lies elsewhere."""
    if dtype not in FLOATS:
        raise LabError(
            f"{folder}: the tensor {name} is of dtype {dtype}, and plain weights are {', '.join(FLOATS)}; get the "
            f"checkpoint that is not quantised, or an AWQ one"
        )


def copier(device) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """A function (host tensor, place on ``device``) that copies the one to the other; to a GPU as a ``Stager`` does."""
    device = torch.device(device)
    return Stager(device).copy if device.type == "cuda" else lambda source, out: out.copy_(source)


def random_weights(
    config: ModelConfig, dtype=torch.float32, device="cpu", seed: int = 0, pack: Packing | None = None
) -> Weights:
    """Normal weights of standard deviation 0.02, norms at 1, biases at 0: real sizes for a benchmark, made in place.

    The same seed gives the same weights on one kind of device; CPU and CUDA draw different numbers. pack: as in
    ``assemble``.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, out: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            out.fill_(1.0)
        elif name.endswith(".bias"):
            out.zero_()
        else:
            out.normal_(0.0, 0.02, generator=generator)

    return assemble(config, fill, dtype, device, pack)


def assemble(
    config: ModelConfig, fill: Callable[[str, torch.Tensor], object], dtype, device, pack: Packing | None = None
) -> Weights:
    """Allocate every matrix in its final layout and let ``fill(name, out)`` write each checkpoint tensor into it.

    pack: what becomes of a layer's products. Of a product that it packs, the plain matrix is gone before the next one
    is made, so that no more than one of them is there at a time.
    """
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

    def product(*names: str) -> Product:
        return stack(*names) if pack is None else pack(names, lambda: stack(*names))

    layers = []
    for i in range(config.num_layers):
        p = f"model.layers.{i}."
        qkv = [f"{p}self_attn.{n}_proj" for n in "qkv"]
        layers.append(
            LayerWeights(
                attn_norm=one(p + "input_layernorm.weight"),
                qkv=product(*(n + ".weight" for n in qkv)),
                qkv_bias=stack(*(n + ".bias" for n in qkv)) if config.qkv_bias else None,
                q_norm=one(p + "self_attn.q_norm.weight") if config.qk_norm else None,
                k_norm=one(p + "self_attn.k_norm.weight") if config.qk_norm else None,
                attn_out=product(p + "self_attn.o_proj.weight"),
                mlp_norm=one(p + "post_attention_layernorm.weight"),
                gate_up=product(p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"),
                down=product(p + "mlp.down_proj.weight"),
            )
        )
    embedding = one("model.embed_tokens.weight")
    lm_head = embedding if config.tie_embeddings else one("lm_head.weight")
    return Weights(embedding, layers, one("model.norm.weight"), lm_head)


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
