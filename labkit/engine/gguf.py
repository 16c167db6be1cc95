"""Turn a GGUF file into a Hugging Face folder of fp32 safetensors, once; later starts map that.

The ``gguf`` package reads the container and dequantises its blocks. What is left to do: translate names and settings,
undo the row order that llama.cpp gives q and k in Llama files, rebuild the tokenizer, and refuse every file that would
come out wrong. The folder is written under a temporary name and renamed when it is complete. A manifest in it tells a
whole copy from a damaged one, which is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from labkit.engine.config import ModelConfig
from labkit.engine.fetch import BUILTIN, altered, explain_full_disk, need_space, one_at_a_time, sha256_of
from labkit.engine.tokenizer import byte_level_bpe
from labkit.engine.weights import tensor_shapes
from labkit.errors import LabError
from labkit.paths import home, scratch

FORMAT = 1  # raise it when the written folder changes, so that older ones are made again
MANIFEST = "manifest.json"  # {file: [size in bytes, SHA-256 of its first BEGINNING_BYTES]}
BEGINNING_BYTES = 16 << 20
END_BYTES = 1 << 20  # of each end of a GGUF file, to tell it from another of its name, size and time
MOST_TYPES = 255  # block types are numbered from 0, 41 the highest so far; beyond this a number is damage
SHARD_BYTES = 2 << 30  # a shard is held in memory while it is written
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # llama.cpp files Mistral under "llama"

# GGUF name -> name inside a Hugging Face layer
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def converted_folder(path: Path, progress: Callable[[str], None] | None = print) -> Path:
    """The Hugging Face folder that belongs to a GGUF file, made first if it is not there.

    It lies in ``$LABKIT_HOME/converted`` and its name carries the file's identity: the known SHA-256 of a built-in
    file, else its size, its modification time and its first and last MiB. A built-in file is hashed before it is
    converted. A folder that is not whole any more (see ``_damage``) is made again, and ``progress`` says so.
    Raises LabError if the file is missing, truncated, damaged, altered, or of a kind this engine does not run, or if
    the folder cannot be written.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise LabError(f"there is no file {path}")
    known = next((m for m in BUILTIN.values() if path == (home() / "models" / m.file).resolve()), None)
    identity = known.sha256 if known else _identity(path)
    folder = home() / "converted" / f"{path.stem}-{identity[:12]}.v{FORMAT}"
    if _damage(folder) is None:
        return folder
    with one_at_a_time(folder):
        if damage := _damage(folder):  # another process may have made it while this one waited
            say = progress or (lambda line: None)
            if folder.exists():
                say(f"the converted copy {folder.name} is not whole ({damage}), so it is made again")
            _convert(path, folder, known.sha256 if known else None, say)
    return folder


def _identity(path: Path) -> str:
    """A hash of a file's size, modification time, first and last MiB: the settings, and a part of the weights."""
    stat = path.stat()
    found = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    try:
        with open(path, "rb") as file:
            found.update(file.read(END_BYTES))
            file.seek(max(0, stat.st_size - END_BYTES))
            found.update(file.read(END_BYTES))
    except OSError as error:
        raise LabError(f"{path} cannot be read ({error}); see that you may read it, or get it again") from error
    return found.hexdigest()


def _damage(folder: Path) -> str | None:
    """What is wrong with a converted folder, or None if it is whole: every file has the size and the beginning that
    the manifest tells. The beginnings hold all settings, the vocabulary and the tables of the weights; reading them
    takes milliseconds, and reading the weights in full would take longer than loading them."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, sha256) in manifest.items():
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size} bytes, expected {size}"
            if _sha256_of_beginning(folder / name) != sha256:
                return f"{name} was altered"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"it cannot be read: {error}"
    return None


def _sha256_of_beginning(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(BEGINNING_BYTES)).hexdigest()


def _convert(path: Path, folder: Path, sha256: str | None, progress: Callable[[str], None]) -> None:
    if sha256 and (got := sha256_of(path)) != sha256:
        raise LabError(altered(path, f"its SHA-256 is {got}, expected {sha256}"))
    reader = open_gguf(path)
    with _reading(path, "settings"):
        config = config_from_gguf(reader, path)
    need_space(folder.parent, 4 * config.num_params + (64 << 20), f"converting {path.name} to fp32")
    progress(f"converting {path.name} to fp32 safetensors, once ({4 * config.num_params / 1e6:.0f} MB)")
    with scratch(folder) as temporary, explain_full_disk(folder.parent):
        part = temporary / "model"
        part.mkdir()
        with _reading(path, "tokenizer"):
            _write_tokenizer(reader, part, path)
        (part / "config.json").write_text(json.dumps(config.to_hf(), indent=2), encoding="utf-8")
        with _reading(path, "tensors"):
            _write_shards(_tensors(reader, config, path), part)
        manifest = {p.name: [p.stat().st_size, _sha256_of_beginning(p)] for p in sorted(part.iterdir())}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        if folder.exists():  # a damaged copy goes where the temporary folder goes
            os.replace(folder, temporary / "damaged")
        os.replace(part, folder)


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Metadata may be of any kind, and damaged: what Python says when it is used becomes a LabError."""
    try:
        yield
    except LabError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise LabError(
            f"{path}: its {what} cannot be read ({type(error).__name__}: {error}); the file is damaged, or of a kind "
            f"this engine does not know: get it again, or use the model's safetensors folder"
        ) from error


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Open a GGUF file, which maps it. Raises LabError if it is something else, cut short, or damaged."""
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise LabError(f"{path} is no GGUF file: it begins with {magic!r}, expected b'GGUF'")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader trusts every length it reads, so damage may surface as any error
        newer = re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error))
        if newer and int(newer[1]) <= MOST_TYPES:
            raise LabError(
                f"{path} holds a tensor of type {newer[1]}, which the installed gguf package does not know; "
                f"a newer one may"
            ) from error
        raise LabError(
            f"{path} is truncated or damaged: {type(error).__name__} while reading its {path.stat().st_size} bytes; "
            f"get it again"
        ) from error


def config_from_gguf(reader: gguf.GGUFReader, path: Path) -> ModelConfig:
    """The model's shape from the file's metadata. Raises LabError for an architecture or setting not supported."""
    get, need = _fields(reader, path)
    arch = need("general.architecture")
    if arch not in ARCHITECTURES:
        raise LabError(f"{path} has the architecture {arch!r}; this engine runs {', '.join(ARCHITECTURES)}")
    kind = get(f"{arch}.rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise LabError(f"{path}: rotary scaling of type {kind!r} is not supported; use the model's safetensors folder")
    heads, hidden = need(f"{arch}.attention.head_count"), need(f"{arch}.embedding_length")
    head_dim = get(f"{arch}.attention.key_length") or hidden // heads
    turned = get(f"{arch}.rope.dimension_count") or head_dim
    if turned != head_dim or (get(f"{arch}.attention.value_length") or head_dim) != head_dim:
        raise LabError(f"{path}: only heads that are rotary in full, with values of the same size, are supported")
    # As in llama.cpp: a factor without a type is linear, older files have it under another key, and 0 is none.
    factors = [get(f"{arch}.rope.{key}") for key in ("scaling.factor", "scale_linear")]
    factor = factors[1] if factors[0] is None else factors[0]
    if kind == "linear" and factor is None:
        need(f"{arch}.rope.scaling.factor")
    scaling = None if kind == "none" or factor in (None, 0, 1) else {"rope_type": "linear", "factor": factor}
    names = {t.name for t in reader.tensors}
    context = need(f"{arch}.context_length")
    eos = [get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    embedding = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
    if embedding is None:
        raise LabError(f"{path} lacks the tensor token_embd.weight")
    return ModelConfig(
        architecture=arch,
        vocab_size=int(embedding.shape[1]),
        hidden_size=hidden,
        intermediate_size=need(f"{arch}.feed_forward_length"),
        num_layers=need(f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=get(f"{arch}.attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_positions=min(context, get(f"{arch}.attention.sliding_window") or context),
        rms_eps=need(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=get(f"{arch}.rope.freq_base") or 10_000.0,
        rope_scaling=scaling,
        tie_embeddings="output.weight" not in names,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        bos_token_id=get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
    )


def _fields(reader: gguf.GGUFReader, path: Path):
    def get(key: str):
        field = reader.get_field(key)
        return None if field is None else field.contents()

    def need(key: str):
        value = get(key)
        if value is None:
            raise LabError(f"{path} lacks the metadata {key}")
        return value

    return get, need


def _tensors(reader: gguf.GGUFReader, config: ModelConfig, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, fp32 tensor) of every tensor, checked for type, shape, finiteness and completeness."""
    shapes = tensor_shapes(config)
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        if name not in shapes:
            raise LabError(f"{path} holds the tensor {tensor.name}, for which this engine has no use")
    names = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    if missing := [name for name in shapes if name not in names]:
        raise LabError(f"{path} lacks the tensor for {missing[0]}{f' and {n} more' if (n := len(missing) - 1) else ''}")
    for name, tensor in names.items():
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise LabError(f"{path}: the tensor {tensor.name} has the unsupported type {kind}") from error
        if array.shape != shapes[name]:
            raise LabError(f"{path}: the tensor {tensor.name} has shape {array.shape}, expected {shapes[name]}")
        if not np.isfinite(array).all():
            raise LabError(f"{path}: the tensor {tensor.name} holds values that are not finite; the file is damaged")
        if config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = _to_half_split(array, config.head_dim)
        yield name, torch.from_numpy(np.array(array, order="C"))  # a copy: the file's map is read-only


def _to_half_split(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp turns neighbours (2i, 2i+1), Hugging Face (i, i + head_dim/2), so Llama files hold q's and k's rows
    interleaved within each head. Row 2i + half goes back to half * head_dim/2 + i. rows: [heads * head_dim, hidden]."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str | None:
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    return f"model.layers.{block}.{LAYER_NAMES[rest]}" if name.startswith("blk.") and rest in LAYER_NAMES else None


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write model.safetensors, or numbered shards with an index once the tensors exceed one shard."""
    weight_map, shard, size, count = {}, {}, 0, 0

    def flush():
        nonlocal shard, size, count
        count += 1
        save_file(shard, folder / f"model-{count:05d}.safetensors", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, f"model-{count:05d}.safetensors"))
        shard, size = {}, 0

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name], size = tensor, size + tensor.nbytes
    flush()
    if count == 1:
        os.replace(folder / "model-00001.safetensors", folder / "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_tokenizer(reader: gguf.GGUFReader, folder: Path, path: Path) -> None:
    get, need = _fields(reader, path)
    if (kind := need("tokenizer.ggml.model")) != "gpt2":
        raise LabError(f"{path}: tokenizer model {kind!r} is not supported, only 'gpt2' (byte-level BPE)")
    if get("tokenizer.ggml.add_bos_token"):
        raise LabError(f"{path}: a tokenizer that adds a first token is not supported here; use the safetensors folder")
    tokens, types = need("tokenizer.ggml.tokens"), need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in need("tokenizer.ggml.merges")]
    added = (int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED))
    special = [i for i, kind in enumerate(types) if kind in added]
    byte_level_bpe(tokens, merges, get("tokenizer.ggml.pre") or "gpt-2", special).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if template := get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
