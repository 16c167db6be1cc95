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
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit.errors import LabError
from labkit.paths import scratch
from labkit.quant.formats import Format, Quantised
from labkit.quant.pack import PER_WORD, pack, unpack

PARTS = ("qweight", "qzeros", "scales")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # {"weight_map": {tensor: file}} of a checkpoint in several files
LONGEST = 240  # bytes of a new folder's name: file systems hold 255, and the hidden name is longer by 15
OLD_AWQ, OLD_GPTQ = "quant_config.json", "quantize_config.json"  # where older files tell their format


def write_awq(
    folder: str | Path,
    config: dict,
    products: Mapping[str, Quantised],
    others: Mapping[str, torch.Tensor],
    along: Iterable[Path] = (),
) -> Path:
    """Write config.json and model.safetensors; the folder appears when everything in it is whole, or not at all.

    config: that of the unquantised model, as Hugging Face has it. products: by name ("model.layers.0.mlp.down_proj").
    others: everything else by its full name; floating tensors are written as fp16. along: files that are copied into
    the folder. Raises LabError for a format that the layout cannot hold, outputs that do not fill words, values beyond
    fp16, a folder that is there already, or one that cannot be written (a full disk, no permission).
    """
    folder = new_folder(folder)
    formats = {q.format for q in products.values()}
    if len(formats) != 1:
        raise LabError(f"all products of a checkpoint share one format, got {', '.join(map(str, formats)) or 'none'}")
    (fmt,) = formats
    check_layout(fmt)
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
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch(folder) as hidden:
            made = hidden / "made"
            made.mkdir()
            save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, made / WEIGHTS, metadata={"format": "pt"})
            written = {**config, "torch_dtype": "float16", "quantization_config": about}
            (made / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
            for path in along:
                shutil.copyfile(path, made / path.name)
            (made / WEIGHTS).chmod(0o644)  # safetensors makes files that nobody else may read
            made.chmod(0o755)
            made.rename(folder)  # the last step: until now there is no checkpoint
    except (OSError, SafetensorError) as error:
        raise LabError(f"{folder} cannot be written, and nothing is left of it ({error})") from error
    return folder


def new_folder(folder: str | Path) -> Path:
    """Raises LabError for one that is there already, and one that cannot be made, as far as can be told beforehand."""
    try:
        folder = Path(folder).expanduser()
    except RuntimeError as error:
        raise LabError(f"{folder} cannot be written: there is no such user's home; give another folder") from error
    if os.path.lexists(folder):
        raise LabError(f"{folder} is there already: choose another folder, or remove it first")
    place = folder
    while not os.path.lexists(place):
        if (size := len(os.fsencode(place.name))) > LONGEST:
            raise LabError(f"a folder's name of {size} bytes is too long ({place.name:.40}…): take at most {LONGEST}")
        place = place.parent
    if not os.path.isdir(place):
        raise LabError(f"{folder} cannot be written: {place} is no folder; choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise LabError(f"{folder} cannot be written: you may not write in {place}; choose another place")
    return folder


def check_layout(fmt: Format) -> None:
    """Raises LabError for a format that the layout cannot hold."""
    if fmt.bits != 4 or fmt.symmetric:
        raise LabError(
            f"the AWQ layout holds 4 bits with zero points; this is {fmt}, which labkit.engine.quantised_model runs "
            f"without a checkpoint"
        )


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
    if not isinstance(about, dict):
        raise LabError(f"{folder}: what describes the quantisation is no JSON object: {about!r:.60}")
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
            f"{folder} says {bits!r} bits, zero_point {about.get('zero_point')}; 4 with zero points can be read"
        )
    try:
        return Format(4, about.get("group_size", about.get("q_group_size", 128)))
    except LabError as error:
        raise LabError(f"{folder}: {error}") from error


def enter(held: dict[str, Path], path: Path, names: Iterable[str]) -> None:
    """Note in ``held`` that the file ``path`` holds these tensors. Raises LabError if another file holds one, too."""
    for name in names:
        if name in held:
            raise LabError(
                f"{path.parent}: both {held[name].name} and {path.name} hold the tensor {name}; one of them is left "
                f"over from another checkpoint: get the folder again"
            )
        held[name] = path


class AwqFiles:
    """An AWQ checkpoint's folder, opened: nothing but its headers is read before it is asked for.

    config: its config.json. format. products: names of what is quantised. others: names of the other tensors.
    """

    def __init__(self, folder: str | Path):
        """All files of a sharded checkpoint are opened. Raises LabError for a folder without config or weights, another
        layout (see ``awq_format``), missing parts, and tensors that two files hold, each by name."""
        self.folder = folder = Path(folder)
        self.config = _json_object(folder / "config.json")
        if self.config.get("quantization_config") is None:
            for name, method in ((OLD_AWQ, "awq"), (OLD_GPTQ, "gptq")):
                if (folder / name).is_file():
                    self.config["quantization_config"] = {"quant_method": method, **_json_object(folder / name)}
                    break
        self.format, files = awq_format(self.config, folder), _files(folder)
        self._where, held = {}, {}  # by tensor: its file, opened; and that file's name
        for path in files:
            try:
                file = safe_open(path, "pt")
            except (SafetensorError, OSError) as error:
                raise LabError(f"{path} cannot be read ({error})") from error
            enter(held, path, file.keys())
            self._where |= dict.fromkeys(file.keys(), file)
        parts = [name for name in self._where if name.rsplit(".", 1)[-1] in PARTS]
        self.products = sorted({name.rsplit(".", 1)[0] for name in parts})
        if not self.products:
            raise LabError(f"{folder} holds no qweight: its weights are not quantised")
        for name in self.products:
            if missing := [part for part in PARTS if f"{name}.{part}" not in self._where]:
                raise LabError(f"{name} lacks its {' and '.join(missing)}")
        parts = set(parts)
        self.others = [name for name in self._where if name not in parts]
        if stray := [name for name in self.others if name.endswith(".g_idx")]:
            raise LabError(f"{folder} holds {stray[0]}, which GPTQ's checkpoints have and AWQ's do not")
        for name in self.products:
            self._check(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a product, [out, in], or of another tensor."""
        if name in self._where:
            return tuple(self._where[name].get_slice(name).get_shape())
        rows, words = self._where[f"{name}.qweight"].get_slice(f"{name}.qweight").get_shape()
        return PER_WORD * words, rows

    def dtype(self, name: str) -> str:
        """Of one of ``others``, as safetensors names it ("F16")."""
        return self._where[name].get_slice(name).get_dtype()

    def tensor(self, name: str) -> torch.Tensor:
        """One of ``others``, on the CPU, in the dtype that it has in the file."""
        return self._where[name].get_tensor(name)

    def product(self, name: str, device="cpu") -> Quantised:
        """One of ``products``, unpacked on ``device``. Raises LabError for scales that are NaN or infinite."""
        held = (self._where[f"{name}.{part}"].get_tensor(f"{name}.{part}") for part in PARTS)
        words, zeros, scales = (tensor.to(device) for tensor in held)
        if not torch.isfinite(scales).all():
            raise LabError(f"{self.folder}: {name} has scales that are NaN or infinite; get the checkpoint again")
        codes, zeros = unpack(words).t().contiguous(), unpack(zeros).t().contiguous()
        return Quantised(codes, scales.t().float().contiguous(), zeros, self.format)

    def _check(self, name: str) -> None:
        """Raises LabError for parts of other dtypes than the layout's, or whose shapes contradict each other."""
        held = [self._where[f"{name}.{part}"].get_slice(f"{name}.{part}") for part in PARTS]
        kinds = [part.get_dtype() for part in held]
        if kinds[:2] != ["I32", "I32"] or kinds[2] not in ("F16", "BF16", "F32"):
            raise LabError(f"{name}: qweight and qzeros are int32 and scales fp16, got {', '.join(kinds)}")
        shapes = [list(part.get_shape()) for part in held]
        if len(shapes[0]) != 2 or 0 in shapes[0]:
            raise LabError(f"{name}: qweight is a matrix [inputs, outputs / {PER_WORD}], got shape {shapes[0]}")
        rows, words = shapes[0]
        try:
            groups = rows // self.format.width(rows)
        except LabError as error:
            raise LabError(f"{name}: {error}") from error
        if shapes[1:] != (wanted := [[groups, words], [groups, PER_WORD * words]]):
            raise LabError(
                f"{name}: qweight {shapes[0]} in groups of {self.format.group} needs qzeros {wanted[0]} and scales "
                f"{wanted[1]}, got {shapes[1]} and {shapes[2]}"
            )


def _json_object(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LabError(f"{path.parent} has no readable {path.name} ({error})") from error
    if not isinstance(found, dict):
        raise LabError(f"{path} holds no JSON object, but {found!r:.60}")
    return found


def _files(folder: Path) -> list[Path]:
    """The files that the index lists, so that neither a missing one nor a stray one goes unseen; without an index all
    that are there."""
    if (folder / INDEX).exists():
        listed = _json_object(folder / INDEX).get("weight_map")
        names = list(listed.values()) if isinstance(listed, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise LabError(f"{folder / INDEX} is no safetensors index: its weight_map names no files")
        names = set(names)
        if missing := sorted(name for name in names if not (folder / name).is_file()):
            raise LabError(f"{folder} has no {missing[0]}, which its index lists")
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LabError(f"{folder} holds no .safetensors file")
    return files


def read_awq(folder: str | Path) -> tuple[dict, dict[str, Quantised], dict[str, torch.Tensor]]:
    """(config, products, everything else) of a checkpoint's folder, as ``write_awq`` takes them. Raises LabError as
    ``AwqFiles`` does."""
    files = AwqFiles(folder)
    products = {name: files.product(name) for name in files.products}
    return files.config, products, {name: files.tensor(name) for name in files.others}
