"""A decoder's layers as quantisation sees them: four products, what they multiply, and which scale may hide where.

    product    reads                                        is preceded by
    qkv        the normalised residual                      attn_norm       (a scale of its input folds into the norm)
    attn_out   attention's output                           the rows of v   (only if v has as many rows: no GQA)
    gate_up    the normalised residual                      mlp_norm
    down       silu(gate) * up                              the rows of up

A method goes through the layers once, with the hidden states of all calibration tokens in memory and one layer's inputs
beside them: ``Layer.run`` gives a layer's inputs and the hidden states after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F

from labkit.errors import LabError

PRODUCTS = ("qkv", "attn_out", "gate_up", "down")  # the names of their weights in a layer


@dataclass
class Inputs:
    """What each product of a layer reads: [tokens, in], the model's dtype."""

    qkv: torch.Tensor
    attn_out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def check_plain(model) -> None:
    """Raises LabError for a model whose products are packed: they are what quantisation ends with."""
    for weight in (getattr(layer, name) for layer in model.weights.layers for name in PRODUCTS):
        if not isinstance(weight, torch.Tensor):
            raise LabError(
                f"the products of this model are packed to {weight.bits} bits, and this needs matrices: take the model "
                f"as it was before, or load its folder without quantization"
            )


def copy_of(model):
    """A model with the same embedding and head and a copy of everything else, to be changed in place."""
    check_plain(model)
    layers = [
        type(layer)(**{f.name: None if (t := getattr(layer, f.name)) is None else t.clone() for f in fields(layer)})
        for layer in model.weights.layers
    ]
    return type(model)(model.config, replace(model.weights, layers=layers))


def embed(model, tokens: torch.Tensor) -> torch.Tensor:
    """tokens: int64 [blocks, n], on any device -> hidden states before layer 0, [blocks * n, hidden], where it is."""
    return F.embedding(tokens.reshape(-1).to(model.device), model.weights.embedding)


class Layer:
    """One layer of ``model`` over blocks of ``n`` tokens; its weights are those the model has at each call."""

    def __init__(self, model, index: int, n: int):
        check_plain(model)
        self.model, self.index, self.n = model, index, n
        self.weights = model.weights.layers[index]
        self._rotary = model.rotary(torch.arange(n, device=model.device))

    def normalised(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[1],), norm, self.model.config.rms_eps)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden], normalised -> [tokens, q_size], before attn_out."""
        return self.model.attend(self.weights, self.index, x, *self._rotary, None, self.n)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden], normalised -> what attention adds to the residual."""
        return F.linear(self.attend(x), self.weights.attn_out)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden], normalised -> [tokens, intermediate], before down."""
        gate, up = F.linear(x, self.weights.gate_up).chunk(2, -1)
        return F.silu(gate) * up

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden], normalised -> what the MLP adds to the residual."""
        return F.linear(self.activate(x), self.weights.down)

    def run(self, hidden: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
        """hidden: [tokens, hidden] before the layer -> (what its products read, the hidden states after it)."""
        x = self.normalised(hidden, self.weights.attn_norm)
        heads = self.attend(x)
        after = hidden + F.linear(heads, self.weights.attn_out)
        y = self.normalised(after, self.weights.mlp_norm)
        inner = self.activate(y)
        return Inputs(x, heads, y, inner), after + F.linear(inner, self.weights.down)


def check_tokens(tokens: torch.Tensor, config) -> None:
    """Raises LabError unless tokens are int64 [blocks, n], at least one token, within the vocabulary and positions."""
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
        raise LabError(f"calibration tokens are int64 [blocks, n], got {tokens.dtype} {list(tokens.shape)}")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
        raise LabError(
            f"calibration tokens run from {int(tokens.min())} to {int(tokens.max())}, the vocabulary has "
            f"{config.vocab_size}: were they made by another tokenizer?"
        )
    if tokens.shape[1] > config.max_positions:
        raise LabError(f"blocks of {tokens.shape[1]} tokens are longer than the model's {config.max_positions}")


def check_model(model, fmt) -> None:
    """Raises LabError, before any work, for products that are packed already, rows that the groups of ``fmt`` do not
    divide, and weights that are NaN or infinite, by their place."""
    check_plain(model)
    for name in PRODUCTS:
        try:
            fmt.width(getattr(model.weights.layers[0], name).shape[1])
        except LabError as error:
            raise LabError(f"{name}: {error}") from error
    w = model.weights
    check_finite("the embedding", w.embedding)
    for i, layer in enumerate(w.layers):
        for field in fields(layer):
            if (tensor := getattr(layer, field.name)) is not None:
                check_finite(f"layer {i}, {field.name}", tensor)
    check_finite("the last norm", w.final_norm)
    if w.lm_head is not w.embedding:
        check_finite("the output head", w.lm_head)


def check_finite(where: str, weight: torch.Tensor) -> None:
    """Raises LabError for a weight that is NaN or infinite."""
    if not torch.isfinite(weight).all():
        at = [int(i) for i in (~torch.isfinite(weight)).nonzero()[0]]
        raise LabError(
            f"{where}: the weight at {at} is NaN or infinity, and what it is multiplied with would be lost; get the "
            f"model again"
        )


def layers(model, n: int, progress: bool = True, what: str = "layers") -> Iterator[Layer]:
    """The model's layers for blocks of ``n`` tokens, with a progress bar."""
    from tqdm.auto import tqdm

    for i in tqdm(range(len(model.weights.layers)), desc=what, disable=not progress, leave=False):
        yield Layer(model, i, n)
