"""The AWQ checkpoint ("gemm" version) that other loaders read, written and read.

For a product NAME with K inputs and N outputs, in groups of G, a safetensors file holds

    NAME.qweight  int32 [K, N / 8]      codes, eight to a word along N (``pack``)
    NAME.qzeros   int32 [K / G, N / 8]  zero points, packed alike, as they are (GPTQ's files hold them less one)
    NAME.scales   fp16  [K / G, N]      w[k, n] = (code[k, n] - zero[k / G, n]) * scale[k / G, n]
    NAME.bias     fp16  [N], if it has one

and config.json holds "quantization_config". Everything is transposed against ``Quantised``, which has [out, in].
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit.errors import LabError
from labkit.quant.formats import Format, Quantised
from labkit.quant.pack import PER_WORD, pack, unpack

PARTS = ("qweight", "qzeros", "scales")
WEIGHTS = "model.safetensors"


def write_awq(
    folder: str | Path, config: dict, products: Mapping[str, Quantised], others: Mapping[str, torch.Tensor]
) -> Path:
    """Write config.json and model.safetensors; the folder appears when both are whole, or not at all.

    config: that of the unquantised model, as Hugging Face has it. products: by name ("model.layers.0.mlp.down_proj").
    others: everything else by its full name; floating tensors are written as fp16. Raises LabError for a format that
    the layout cannot hold, outputs that do not fill words, values beyond fp16, or a folder that is there already.
    """
    folder = Path(folder)
    if folder.exists():
        raise LabError(f"{folder} is there already: choose another folder, or remove it first")
    formats = {q.format for q in products.values()}
    if len(formats) != 1:
        raise LabError(f"all products of a checkpoint share one format, got {', '.join(map(str, formats)) or 'none'}")
    (fmt,) = formats
    if fmt.bits != 4 or fmt.symmetric:
        raise LabError(f"the AWQ layout holds 4 bits with zero points; this is {fmt}")
    tensors = {}
    for name, q in products.items():
        if q.codes.shape[0] % PER_WORD:
            raise LabError(f"{name} has {q.codes.shape[0]} outputs; the layout packs them by {PER_WORD}")
        tensors[f"{name}.qweight"] = pack(q.codes.t())
        tensors[f"{name}.qzeros"] = pack(q.zeros.t())
        tensors[f"{name}.scales"] = _half(f"{name}.scales", q.scales.t())
    for name, tensor in others.items():
        tensors[name] = _half(name, tensor) if tensor.is_floating_point() else tensor
    about = {
        "quant_method": "awq", "bits": 4, "group_size": fmt.group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, made / WEIGHTS, metadata={"format": "pt"})
        written = {**config, "torch_dtype": "float16", "quantization_config": about}
        (made / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        made.chmod(0o755)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)  # after the rename there is nothing left of it
    return folder


def _half(name: str, tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.half()
    if not torch.isfinite(half).all():
        raise LabError(f"{name} holds values that fp16 cannot (up to {tensor.abs().max():.3g})")
    return half


def awq_format(config: dict, folder: str | Path = "the checkpoint") -> Format:
    """The format that a checkpoint's config names. Raises LabError, with what it is instead, for any other layout."""
    about = config.get("quantization_config")
    if about is None:
        raise LabError(f"{folder} is not quantised: its config.json has no quantization_config")
    method = str(about.get("quant_method", "")).lower()
    if method == "gptq":
        raise LabError(f"{folder} is a GPTQ checkpoint: it packs along the inputs and stores zero points less one")
    if method != "awq":
        raise LabError(f"{folder} is quantised by {method or 'an unnamed method'}; AWQ checkpoints can be read")
    version, bits = str(about.get("version", "gemm")).lower(), about.get("bits", about.get("w_bit"))
    if version != "gemm":
        raise LabError(
            f"{folder} is of AWQ's version {version!r}, which orders its words otherwise; 'gemm' can be read"
        )
    if bits != 4 or not about.get("zero_point", True):
        raise LabError(
            f"{folder} says {bits} bits, zero_point {about.get('zero_point')}; 4 with zero points can be read"
        )
    return Format(4, about.get("group_size", about.get("q_group_size", 128)))


class AwqFiles:
    """An AWQ checkpoint's folder, opened: nothing but its headers is read before it is asked for.

    config: its config.json. format. products: names of what is quantised. others: names of the other tensors.
    """

    def __init__(self, folder: str | Path):
        """All files of a sharded checkpoint are opened. Raises LabError for a folder without config or weights, another
        layout (see ``awq_format``), and missing parts, each by name."""
        self.folder = folder = Path(folder)
        try:
            self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            old = folder / "quant_config.json"
            if "quantization_config" not in self.config and old.is_file():  # how older files have it
                about = {"quant_method": "awq", **json.loads(old.read_text(encoding="utf-8"))}
                self.config["quantization_config"] = about
        except (OSError, ValueError) as error:
            raise LabError(f"{folder} has no readable config.json ({error})") from error
        self.format, files = awq_format(self.config, folder), sorted(folder.glob("*.safetensors"))
        if not files:
            raise LabError(f"{folder} holds no .safetensors file")
        self._where: dict = {}
        for path in files:
            try:
                file = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                raise LabError(f"{path} cannot be read ({error})") from error
            self._where |= dict.fromkeys(file.keys(), file)
        parts = [name for name in self._where if name.rsplit(".", 1)[-1] in PARTS]
        self.products = sorted({name.rsplit(".", 1)[0] for name in parts})
        if not self.products:
            raise LabError(f"{folder} holds no qweight: its weights are not quantised")
        for name in self.products:
            if missing := [part for part in PARTS if f"{name}.{part}" not in self._where]:
                raise LabError(f"{name} lacks its {' and '.join(missing)}")
        self.others = [name for name in self._where if name not in set(parts)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a product, [out, in], or of another tensor."""
        if name in self._where:
            return tuple(self._where[name].get_slice(name).get_shape())
        rows, words = self._where[f"{name}.qweight"].get_slice(f"{name}.qweight").get_shape()
        return PER_WORD * words, rows

    def tensor(self, name: str) -> torch.Tensor:
        """One of ``others``, on the CPU, in the dtype that it has in the file."""
        return self._where[name].get_tensor(name)

    def product(self, name: str, device="cpu") -> Quantised:
        """One of ``products``, unpacked on ``device``. Raises LabError for parts whose shapes contradict each other."""
        held = (self._where[f"{name}.{part}"].get_tensor(f"{name}.{part}") for part in PARTS)
        words, zeros, scales = (tensor.to(device) for tensor in held)
        rows, columns = words.shape[0], PER_WORD * words.shape[1]
        groups = rows // self.format.width(rows)
        if zeros.shape != (groups, columns // PER_WORD) or scales.shape != (groups, columns):
            raise LabError(
                f"{name}: qweight {list(words.shape)} in groups of {self.format.group} needs qzeros "
                f"{[groups, columns // PER_WORD]} and scales {[groups, columns]}, got {list(zeros.shape)} and "
                f"{list(scales.shape)}"
            )
        codes, zeros = unpack(words).t().contiguous(), unpack(zeros).t().contiguous()
        return Quantised(codes, scales.t().float().contiguous(), zeros, self.format)


def read_awq(folder: str | Path) -> tuple[dict, dict[str, Quantised], dict[str, torch.Tensor]]:
    """(config, products, everything else) of a checkpoint's folder, as ``write_awq`` takes them. Raises LabError as
    ``AwqFiles`` does."""
    files = AwqFiles(folder)
    products = {name: files.product(name) for name in files.products}
    return files.config, products, {name: files.tensor(name) for name in files.others}
