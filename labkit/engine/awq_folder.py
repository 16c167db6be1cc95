"""AWQ checkpoints as this engine's models: read from a Hugging Face folder, and written from a quantised model.

Read weights either stay packed (see packed.py), or become what their codes stand for, in the model's dtype: then they
compute the same and take the memory of unquantised ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from labkit.engine.config import ModelConfig
from labkit.engine.packed import check_report, pack
from labkit.engine.weights import Product, Weights, assemble, check_float, copier, tensor_shapes
from labkit.errors import LabError
from labkit.quant.checkpoint import AwqFiles, check_layout, write_awq
from labkit.quant.formats import Quantised
from labkit.quant.rtn import Report

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)


def is_awq(hf: object) -> bool:
    """Whether what a config.json holds is the config of an AWQ checkpoint."""
    about = hf.get("quantization_config") if isinstance(hf, dict) else None
    return isinstance(about, dict) and str(about.get("quant_method", "")).lower() == "awq"


def load_awq(folder: Path, config: ModelConfig, dtype=torch.float32, device="cpu", packed: bool = False) -> Weights:
    """The weights of an AWQ folder. packed: products stay as they are, in the kernel's order; else, and where a
    checkpoint leaves one of the matrices that are stacked unquantised, they become what their codes stand for.

    One product at a time is read and unpacked, on the device. Raises LabError for another layout, tensors that are
    missing, of another shape than its config.json asks for, of no use to it, or plain and no floating numbers, and for
    what no kernel multiplies.
    """
    files, copy = AwqFiles(folder), copier(device)
    quantised, plain = set(files.products), set(files.others)
    known = set(tensor_shapes(config))
    for name in (*(f"{name}.weight" for name in files.products), *files.others):
        if name not in known and not is_harmless(name):
            raise LabError(f"{folder} holds the tensor {name}, for which a model of its config.json has no use")
    for name, shape in tensor_shapes(config).items():
        product = name.removesuffix(".weight")
        if product not in quantised and name not in plain:
            raise LabError(f"{folder} lacks the tensor {name}, plain or quantised, which its config.json asks for")
        got = files.shape(product if product in quantised else name)
        if got != shape:
            raise LabError(f"{folder}: the tensor {name} has shape {got}, and its config.json asks for {shape}")
        if product not in quantised:
            check_float(folder, name, files.dtype(name))

    def fill(name: str, out: torch.Tensor) -> None:
        product = name.removesuffix(".weight")
        if product in quantised:
            out.copy_(files.product(product, device).dequantise())
        else:
            copy(files.tensor(name), out)

    def keep(names: tuple[str, ...], make: Callable[[], torch.Tensor]) -> Product:
        products = [name.removesuffix(".weight") for name in names]
        if not quantised.issuperset(products):
            return make()
        return pack(_stacked([files.product(name, device) for name in products]), dtype, device)

    return assemble(config, fill, dtype, device, keep if packed else None)


def save_awq(model, report: Report, folder: str | Path, tokenizer_from: str | Path | None = None) -> Path:
    """Write ``model``, whose products ``report`` tells the codes of, as an AWQ checkpoint -> the folder.

    tokenizer_from: a folder whose tokenizer files are copied. Everything but the products is written as fp16. The
    folder appears whole or not at all. Raises LabError as ``write_awq`` does, for a report of another model, and for a
    folder without a tokenizer.json.
    """
    check_layout(report.format)
    check_report(model, report)
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
    along = [] if source is None else [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    return write_awq(folder, c.to_hf(), products, others, along)


def is_harmless(name: str) -> bool:
    """Of a tensor that no model of ours asks for: a tied model's second copy, or an old checkpoint's rotary table."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _split(q: Quantised, rows: dict[str, int]) -> dict[str, Quantised]:
    """A stacked product's codes as those of the matrices it was stacked from: {name: how many rows}."""
    counts = list(rows.values())
    parts = zip(rows, q.codes.split(counts), q.scales.split(counts), q.zeros.split(counts), strict=True)
    return {name: Quantised(codes, scales, zeros, q.format) for name, codes, scales, zeros in parts}


def _stacked(parts: list[Quantised]) -> Quantised:
    """Matrices with one input, one below the other: what ``_split`` takes apart."""
    codes, scales, zeros = (torch.cat([getattr(q, name) for q in parts]) for name in ("codes", "scales", "zeros"))
    return Quantised(codes, scales, zeros, parts[0].format)
