"""The first kernel of a step: which token each row holds, and its row of the embedding, in one launch.

A token that the GPU has just sampled is not known to the host when it prepares the next step. So a row names either its
token, or (``source`` >= 0) the place in a buffer of sampled tokens where it will be. Rows are copied as they are.

    ids       [n], int32; those that come from the buffer are put in as well, for whoever needs them later
    source    [n], int32: -1, or a place in ``tokens``
    tokens    [places], int32
    embedding [vocab, hidden] -> [n, hidden]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, arch
from kernels.op import Case, Cost, Op

BLOCK = 1024  # elements of a row that a program copies


def embed_reference(ids, source, tokens, embedding) -> torch.Tensor:
    """The definition. Shapes as in the module's head; fills ``ids`` -> [n, hidden]."""
    sampled = tokens[source.clamp(min=0).long()]
    ids.copy_(torch.where(source >= 0, sampled, ids))
    return embedding[ids.long()]


@triton.jit(do_not_specialize=["hidden"])
def _embed_kernel(
    ids_ptr, source_ptr, tokens_ptr, embedding_ptr, out_ptr, hidden, stride_e,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + row)
    given = tl.load(ids_ptr + row)
    sampled = tl.load(tokens_ptr + tl.maximum(source, 0))
    id = tl.where(source >= 0, sampled, given)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(embedding_ptr + id.to(tl.int64) * stride_e + cols, mask=cols < hidden)
    tl.store(out_ptr + row * hidden + cols, x, mask=cols < hidden)
    # A row's other programs may read ids afterwards: where it changes, they take the token from the buffer.
    tl.store(ids_ptr + row, id, mask=tl.program_id(1) == 0)


def embed(ids: torch.Tensor, source: torch.Tensor, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Shapes as in the module's head -> [n, hidden], new. Fills ``ids``.

    Raises ValueError for shapes or dtypes that do not fit. A token outside the vocabulary reads foreign memory.
    """
    for name, t, shape in (("ids", ids, ids.shape[:1]), ("source", source, ids.shape), ("tokens", tokens, None)):
        if t.dtype != torch.int32 or t.dim() != 1 or not t.is_contiguous() or (shape and t.shape != shape):
            raise ValueError(
                f"embed: {name} must be contiguous int32 [{shape[0] if shape else 'places'}], "
                f"got {t.dtype} {list(t.shape)} with strides {t.stride()}"
            )
    if embedding.dim() != 2 or embedding.dtype not in DTYPES or embedding.stride(1) != 1:
        raise ValueError(
            "embed: embedding must be float32, float16 or bfloat16 [vocab, hidden] with contiguous columns, "
            f"got {embedding.dtype} {list(embedding.shape)} with strides {embedding.stride()}"
        )
    n, hidden = ids.shape[0], embedding.shape[1]
    out = torch.empty((n, hidden), dtype=embedding.dtype, device=embedding.device)
    if n:
        overlap = arch(embedding.device) >= 90
        _embed_kernel[(n, triton.cdiv(hidden, BLOCK))](
            ids, source, tokens, embedding, out, hidden, embedding.stride(0), BLOCK=BLOCK, OVERLAP=overlap,
            num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
    return out


def embed_cost(ids, source, tokens, embedding) -> Cost:
    """A row of the embedding read and written for each token, and its indices."""
    n = ids.shape[0]
    return Cost(2 * n * embedding.shape[1] * embedding.element_size() + 4 * (3 * n + int((source >= 0).sum())), 0)


def _case(name: str, n: int, vocab: int, hidden: int, sampled: bool = True) -> Case:
    def make(device, dtype, generator):
        ids = torch.randint(vocab, (n,), generator=generator)
        tokens = torch.randint(vocab, (max(2 * n, 1),), generator=generator)
        source = torch.randint(-1, max(2 * n, 1), (n,), generator=generator) if sampled else torch.full((n,), -1)
        embedding = torch.randn(vocab, hidden, generator=generator).to(device, dtype)
        ids, source, tokens = (t.to(device, torch.int32) for t in (ids, source, tokens))
        return {"ids": ids, "source": source, "tokens": tokens, "embedding": embedding}

    return Case(name, make)


OP = Op(
    name="embed",
    reference=embed_reference,
    triton=embed,
    cost=embed_cost,
    cases=(
        _case("no tokens", 0, 4, 8),
        _case("one token", 1, 1, 1),
        _case("given and sampled", 17, 40, 96),
        _case("all given", 5, 40, 64, sampled=False),
        _case("rows of several programs", 6, 10, 2500),
    ),
    mutates=("ids",),
)
