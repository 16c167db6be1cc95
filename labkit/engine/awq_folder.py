"""AWQ checkpoints as this engine's models: read from a Hugging Face folder, and written from a quantised model.

Read weights become what their codes stand for, in the model's dtype: they compute what the checkpoint means and take
the memory of unquantised ones.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from labkit.engine.config import ModelConfig
from labkit.engine.weights import Weights, assemble, tensor_shapes
from labkit.errors import LabError
from labkit.quant.checkpoint import read_awq, write_awq
from labkit.quant.formats import Quantised
from labkit.quant.rtn import Report

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def is_awq(hf: object) -> bool:
    """Whether what a config.json holds is the config of an AWQ checkpoint."""
    about = hf.get("quantization_config") if isinstance(hf, dict) else None
    return isinstance(about, dict) and str(about.get("quant_method", "")).lower() == "awq"


def load_awq(folder: Path, config: ModelConfig, dtype=torch.float32, device="cpu") -> Weights:
    """The weights of an AWQ folder, dequantised. Raises LabError for another layout, or tensors that are missing or of
    another shape than its config.json asks for."""
    _, products, others = read_awq(folder)
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        q, plain = products.get(name.removesuffix(".weight")), others.get(name)
        if q is None and plain is None:
            raise LabError(f"{folder} lacks the tensor {name}, plain or quantised, which its config.json asks for")
        got = tuple(plain.shape if q is None else q.codes.shape)
        if got != shape:
            raise LabError(f"{folder}: the tensor {name} has shape {got}, and its config.json asks for {shape}")

    def fill(name: str, out: torch.Tensor) -> None:
        q = products.get(name.removesuffix(".weight"))
        out.copy_(others[name] if q is None else q.dequantise())

    return assemble(config, fill, dtype, device)


def save_awq(model, report: Report, folder: str | Path, tokenizer_from: str | Path | None = None) -> Path:
    """Write ``model``, whose products ``report`` tells the codes of, as an AWQ checkpoint -> the folder.

    tokenizer_from: a folder whose tokenizer files are copied. Everything but the products is written as fp16. Raises
    LabError as ``write_awq`` does, and for a folder without a tokenizer.json.
    """
    source = None if tokenizer_from is None else Path(tokenizer_from)
    if source is not None and not (source / "tokenizer.json").is_file():
        raise LabError(f"{source} has no tokenizer.json to copy")
    c, w = model.config, model.weights
    products: dict[str, Quantised] = {}
    others = {"model.embed_tokens.weight": w.embedding, "model.norm.weight": w.final_norm}
    if not c.tie_embeddings:
        others["lm_head.weight"] = w.lm_head
    sizes = {"q": c.q_size, "k": c.kv_size, "v": c.kv_size}
    for i, (layer, codes) in enumerate(zip(w.layers, report.quantised, strict=True)):
        p = f"model.layers.{i}."
        products |= _split(codes["qkv"], {f"{p}self_attn.{n}_proj": rows for n, rows in sizes.items()})
        products |= _split(codes["gate_up"], {f"{p}mlp.{n}_proj": c.intermediate_size for n in ("gate", "up")})
        products[f"{p}self_attn.o_proj"], products[f"{p}mlp.down_proj"] = codes["attn_out"], codes["down"]
        others[f"{p}input_layernorm.weight"] = layer.attn_norm
        others[f"{p}post_attention_layernorm.weight"] = layer.mlp_norm
        if layer.qkv_bias is not None:
            for n, bias in zip(sizes, layer.qkv_bias.split(list(sizes.values())), strict=True):
                others[f"{p}self_attn.{n}_proj.bias"] = bias
        if layer.q_norm is not None:
            others[f"{p}self_attn.q_norm.weight"] = layer.q_norm
            others[f"{p}self_attn.k_norm.weight"] = layer.k_norm
    done = write_awq(folder, c.to_hf(), products, others)
    for name in TOKENIZER_FILES if source is not None else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, done / name)
    return done


def _split(q: Quantised, rows: dict[str, int]) -> dict[str, Quantised]:
    """A stacked product's codes as those of the matrices it was stacked from: {name: how many rows}."""
    counts = list(rows.values())
    parts = zip(rows, q.codes.split(counts), q.scales.split(counts), q.zeros.split(counts), strict=True)
    return {name: Quantised(codes, scales, zeros, q.format) for name, codes, scales, zeros in parts}
