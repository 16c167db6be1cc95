"""Small random models, as transformers objects and as GGUF files, and what a refusal must not leave behind."""

import gguf
import torch

from labkit.engine.gguf import LAYER_NAMES, MODEL_NAMES

TINY = {
    # Every tiny model differs from the embedded one where that one is tame: a head size that is not hidden / heads,
    # odd group sizes, untied and tied heads, biases that are not zero.
    "llama": dict(hidden_size=48, head_dim=32, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    "mistral": dict(hidden_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=4, sliding_window=None),
    "qwen2": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=False),
    "qwen3": dict(hidden_size=40, head_dim=24, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True),
}


def tiny_hf(family: str, seed: int = 0, **changes):
    """A random two-layer transformers model; norm weights and biases are random too, as 1 and 0 would hide errors."""
    import transformers

    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    shape = dict(vocab_size=len(VOCABULARY), intermediate_size=72, num_hidden_layers=2, max_position_embeddings=128)
    shape |= dict(bos_token_id=None, eos_token_id=EOS, pad_token_id=None, rms_norm_eps=1e-5) | TINY[family] | changes
    config = getattr(transformers, f"{prefix}Config")(**shape)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(center, 0.3 if parameter.dim() == 1 else 0.15)
    return model


def byte_letters() -> list[str]:
    """The 256 letters of byte-level BPE in byte order, from transformers' own table."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [bytes_to_unicode()[b] for b in range(256)]


MERGES = ["h e", "l l", "Ġ he", "Ġhe ll"]
VOCABULARY = ["<|end|>", "<|user|>", *byte_letters(), *(m.replace(" ", "") for m in MERGES)]
EOS = 0


def write_gguf(path, model, arch=None, skip=(), extra=None, meta=None, quant=None, poison=None):
    """Write a transformers model as GGUF and return the path.

    skip: tensors to leave out; extra: {name: (array, type)} to add; meta: metadata to override, where None leaves a key
    out; quant: the type of those matrices whose rows allow it; poison: a tensor that gets one infinity.
    """
    c = model.config
    arch = arch or ("llama" if c.model_type == "mistral" else c.model_type)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer = gguf.GGUFWriter(path, arch)
    values = {
        f"{arch}.block_count": c.num_hidden_layers,
        f"{arch}.context_length": c.max_position_embeddings,
        f"{arch}.embedding_length": c.hidden_size,
        f"{arch}.feed_forward_length": c.intermediate_size,
        f"{arch}.attention.head_count": c.num_attention_heads,
        f"{arch}.attention.head_count_kv": c.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        f"{arch}.rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": EOS,
    } | (meta or {})
    for key, value in values.items():
        if value is not None:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(key, value)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3] + [1] * (len(VOCABULARY) - 2))
    writer.add_token_merges(MERGES)
    hf_to_gguf = {v: k for k, v in MODEL_NAMES.items()}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if hf_name in hf_to_gguf:
            target = hf_to_gguf[hf_name]
        else:
            _, _, block, rest = hf_name.split(".", 3)
            target = f"blk.{block}." + next(k for k, v in LAYER_NAMES.items() if v == rest)
        if target in skip:
            continue
        data = tensor.numpy().copy()
        if target == poison:
            data.flat[3] = float("inf")
        if arch == "llama" and target.endswith(("attn_q.weight", "attn_k.weight")):
            # llama.cpp's order, written out row by row: file row 2i + half is model row half * D/2 + i of its head
            order = [h + half * (head_dim // 2) + i for h in range(0, len(data), head_dim)
                     for i in range(head_dim // 2) for half in (0, 1)]  # fmt: skip
            data = data[order]
        if quant is not None and data.ndim == 2 and data.shape[1] % 32 == 0:
            writer.add_tensor(target, gguf.quantize(data, quant), raw_dtype=quant)
        else:
            writer.add_tensor(target, data)
    for target, (data, kind) in (extra or {}).items():
        writer.add_tensor(target, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def left_over(home) -> list[str]:
    """Files and folders under ``home`` that are no locks: after a refusal there must be none."""
    return sorted(p.name for sub in ("models", "converted") for p in (home / sub).glob("*") if p.suffix != ".lock")
