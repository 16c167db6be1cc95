"""AWQ over a whole model against another one, written from the method's description: matrix by matrix, on transformers'
layers with hooks, with the tokens themselves in every loss. And the mistakes that are made with it, each of which this
comparison must see."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from labkit.engine import load
from labkit.quant import Format, awq
from labkit.quant.awq import RATIOS
from tests.engine.tiny_models import tiny_hf

BITS, GROUP = 3, 32
WIDE = dict(hidden_size=96, head_dim=32, intermediate_size=96, tie_word_embeddings=False)
MODELS = {
    "grouped heads": ("llama", WIDE),
    "as many kv heads": ("mistral", dict(hidden_size=128, head_dim=32, intermediate_size=96)),
    "biases": ("qwen2", dict(hidden_size=128, num_key_value_heads=4, intermediate_size=96)),
    "norms of q and k": ("qwen3", WIDE),
}
MISTAKES = (
    "q and k are clipped", "nothing is clipped", "clipped before it is scaled", "clipped with inputs before scaling",
    "inputs from quantised layers", "scales of the largest input", "only one of the matrices is rounded in a search",
)  # fmt: skip


def tokens():
    return torch.randint(2, 200, (4, 32), generator=torch.Generator().manual_seed(5))


def coded(w):
    """w: [out, in] -> (codes, what they stand for)."""
    groups, top = w.reshape(len(w), -1, GROUP), 2**BITS - 1
    low, high = groups.min(-1, True)[0].clamp(max=0), groups.max(-1, True)[0].clamp(min=0)
    scale = ((high - low) / top).half().float().clamp(min=2**-14)
    zero = (-low / scale).round().clamp(0, top)
    codes = ((groups / scale).round() + zero).clamp(0, top)
    return codes.reshape(w.shape).to(torch.uint8), ((codes - zero) * scale).reshape(w.shape)


def normalised(mean, ratio):
    scale = mean.pow(ratio).clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()


def best_scale(linears, x, block, mistake):
    """block: () -> what the scaled matrices lead to."""
    mean = x.abs().amax(0) if mistake == "scales of the largest input" else x.abs().mean(0)
    wanted, kept, losses = block(), [linear.weight.clone() for linear in linears], []
    for ratio in RATIOS:
        scale = normalised(mean, ratio)
        for linear, weight in zip(linears, kept, strict=True):
            linear.weight.copy_(coded(weight * scale)[1] / scale)
        losses.append(float((block() - wanted).square().mean()))
    for linear, weight in zip(linears, kept, strict=True):
        linear.weight.copy_(weight)
    ratio = RATIOS[losses.index(min(losses))]
    return normalised(mean, ratio), ratio


def clip(linear, x):
    for start in range(0, x.shape[1], GROUP):
        part, some = linear.weight[:, start : start + GROUP], x[:, start : start + GROUP]
        losses, cuts = [], []
        for i in range(10):
            most = part.abs().amax(1, keepdim=True) * (1 - i / 20)
            cuts.append(part.clamp(-most, most))
            losses.append(((coded(cuts[-1])[1] - part) @ some.t()).square().mean(1))
        best = torch.stack(losses).argmin(0)
        part.copy_(torch.stack(cuts)[best, torch.arange(len(part))])


@torch.no_grad()
def reference(model, ids, mistake=None):
    """-> for each layer ({name of a matrix: codes}, {name of a matrix: the ratio of its scale})."""
    held, found = {}, []

    def first(module, args, kwargs):
        held["in"], held["kwargs"] = args[0] if args else kwargs.pop("hidden_states"), kwargs

    hook = model.model.layers[0].register_forward_pre_hook(first, with_kwargs=True)
    model(ids, use_cache=False)
    hook.remove()
    hidden = held["in"]

    for layer in model.model.layers:
        codes, ratios, hidden = one_layer(layer, hidden, held["kwargs"], mistake)
        found.append((codes, ratios))
    return found


def run(module, x, **kwargs):
    out = module(x, **kwargs)
    return out[0] if isinstance(out, tuple) else out


def one_layer(layer, hidden, kwargs, mistake):
    """-> (codes, ratios, the hidden states that the next layer is calibrated with)."""
    attn, mlp, feats = layer.self_attn, layer.mlp, {}
    linears = {n: getattr(attn, n) for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
    linears |= {n: getattr(mlp, n) for n in ("gate_proj", "up_proj", "down_proj")}
    hooks = [
        linear.register_forward_pre_hook(lambda m, args, name=name: feats.__setitem__(name, args[0].clone()))
        for name, linear in linears.items()
    ]
    after = run(layer, hidden, **kwargs)
    for hook in hooks:
        hook.remove()
    flat = {name: x.flatten(0, -2) for name, x in feats.items()}
    if mistake == "clipped before it is scaled":
        for name in ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            clip(linears[name], flat[name])
    sets = [
        (("q_proj", "k_proj", "v_proj"), lambda: run(attn, feats["q_proj"], **kwargs)),
        (("o_proj",), lambda: attn.o_proj(feats["o_proj"])),
        (("gate_proj", "up_proj"), lambda: mlp(feats["gate_proj"])),
        (("down_proj",), lambda: mlp.down_proj(feats["down_proj"])),
    ]
    if attn.v_proj.out_features != attn.o_proj.in_features:
        del sets[1]
    scales, ratios = {}, {}
    for names, block in sets:
        rounded = names[-1:] if mistake == "only one of the matrices is rounded in a search" else names
        scale, ratio = best_scale([linears[n] for n in rounded], flat[names[0]], block, mistake)
        for name in names:
            scales[name], ratios[name] = scale, ratio
    for name, scale in scales.items():
        linears[name].weight.mul_(scale)
    layer.input_layernorm.weight.div_(scales["q_proj"])
    layer.post_attention_layernorm.weight.div_(scales["gate_proj"])
    rows = [("up_proj", "down_proj"), *([("v_proj", "o_proj")] if "o_proj" in scales else [])]
    for before, name in rows:
        linears[before].weight.div_(scales[name][:, None])
        if linears[before].bias is not None:
            linears[before].bias.div_(scales[name])
    for name, linear in linears.items():
        late = mistake not in ("nothing is clipped", "clipped before it is scaled")
        if late and (name not in ("q_proj", "k_proj") or mistake == "q and k are clipped"):
            x = flat[name]
            if name in scales and mistake != "clipped with inputs before scaling":
                x = x / scales[name]
            clip(linear, x)
    codes = {}
    for name, linear in linears.items():
        codes[name], weight = coded(linear.weight)
        linear.weight.copy_(weight)
    return codes, ratios, run(layer, hidden, **kwargs) if mistake == "inputs from quantised layers" else after


@cache
def ours(which, tmp):
    family, changes = MODELS[which]
    original = tiny_hf(family, seed=1, **changes)
    _loud(original)
    original.save_pretrained(tmp)
    model, _ = load(tmp, progress=None)
    return awq(model, Format(BITS, GROUP), tokens(), progress=False)


def _loud(model):
    """A few loud channels, as trained models have them, so that scales have something to find."""
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[torch.randperm(len(norm.weight), generator=torch.Generator().manual_seed(3))[:4]] *= 8


def share_that_differs(report, found):
    """Of all codes, by layer."""
    shares = []
    for mine, (codes, _) in zip(report.quantised, found, strict=True):
        stacked = {
            "qkv": torch.cat([codes[f"{n}_proj"] for n in "qkv"]), "attn_out": codes["o_proj"],
            "gate_up": torch.cat([codes["gate_proj"], codes["up_proj"]]), "down": codes["down_proj"],
        }  # fmt: skip
        off = sum(int((mine[name].codes != want).sum()) for name, want in stacked.items())
        shares.append(off / sum(want.numel() for want in stacked.values()))
    return shares


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def other(which, mistake=None):
    family, changes = MODELS[which]
    model = tiny_hf(family, seed=1, **changes)
    _loud(model)
    return reference(model, tokens(), mistake)


@pytest.mark.parametrize("which", MODELS)
def test_codes_and_ratios_are_those_of_the_description(which, place):
    report = ours(which, place / which)
    found = other(which)
    for choice, (_, ratios) in zip(report.choices, found, strict=True):
        assert choice["qkv"]["ratio"] == ratios["q_proj"] and choice["gate_up"]["ratio"] == ratios["gate_proj"]
        assert choice["down"]["ratio"] == ratios["down_proj"] and choice["attn_out"]["ratio"] == ratios.get("o_proj")
    assert any(choice["qkv"]["ratio"] > 0 for choice in report.choices), "without scales there is little to compare"
    # Both reckon in fp32 and in another order, so a value on the edge of two codes or two cuts may fall to the other.
    assert max(share_that_differs(report, found)) < 2e-3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_each_mistake(mistake, place):
    report = ours("biases", place / "biases")
    assert max(share_that_differs(report, other("biases", mistake))) > 0.02
