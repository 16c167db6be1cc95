"""What the model reads in a step, built on the host with numpy and brought to the device in one transfer.

A step's chunks are packed one after the other: n tokens of s sequences.

    ids         [n]       token ids; where a token is not known on the host yet, 0
    source      [n]       -1, or the row of the token buffer in which the step before has left this token
    positions   [n]       place of each token in its sequence
    slots       [n]       where its key and value go: block * block_size + offset; -1 for padding
    seq_lens    [s]       tokens of each sequence in the cache once this step has stored its own; 0 for padding
    bounds      [s + 1]   sequence i has the tokens [bounds[i], bounds[i + 1])
    rows        [m]       the tokens whose logits are asked for: the last one of each chunk that samples
    tables      [s, width] block tables, 0 (the null block) past a sequence's last

All are int32 and lie in one buffer, each beginning at a multiple of 16 bytes, so that kernels load whole vectors and
are not compiled once more for each alignment. width is that of the longest sequence allowed, for a CUDA graph's sake.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import is_

import numpy as np
import torch

from labkit.engine.request import Request
from labkit.engine.step import Chunk

ALIGN = 4  # int32 elements


@dataclass(frozen=True)
class Batch:
    """Views of one device buffer, as in the module's head. max_q: no chunk is longer; decode: each is one token."""

    ids: torch.Tensor
    source: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    bounds: torch.Tensor
    rows: torch.Tensor
    tables: torch.Tensor
    max_q: int
    decode: bool


class Unread:
    """The tokens that a step has left in the token buffer: row i holds the one of requests[i] at positions[i]."""

    def __init__(self, requests: tuple[Request, ...] = (), positions: tuple[int, ...] = ()):
        self.requests, self.positions = requests, positions
        self._rows: dict[int, tuple[int, int]] | None = None

    def __bool__(self) -> bool:
        return bool(self.requests)

    def get(self, id: int) -> tuple[int, int]:
        """(position, row) of a request by its id; (-1, -1) if the step sampled none for it."""
        if self._rows is None:
            pairs = zip(self.requests, self.positions, strict=True)
            self._rows = {request.id: (position, row) for row, (request, position) in enumerate(pairs)}
        return self._rows.get(id, (-1, -1))


def layout(tokens: int, seqs: int, width: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each array of a batch lies in the buffer: {name: (begin, end)} in elements, and the elements in all."""
    sizes = dict(ids=tokens, source=tokens, positions=tokens, slots=tokens, seq_lens=seqs, bounds=seqs + 1, rows=seqs)
    places, at = {}, 0
    for name, size in (sizes | {"tables": seqs * width}).items():
        places[name] = (at, at + size)
        at += -(-size // ALIGN) * ALIGN
    return places, at


class InputBuilder:
    """Makes a Batch of a step's chunks.

    Two pinned host buffers take turns, and none is written again before the copy out of it has ended; one device buffer
    is enough, since the copy into it waits, on the device, for the step that reads it.
    """

    def __init__(self, block_size: int, max_seqs: int, max_tokens: int, max_model_len: int, device: torch.device):
        """max_tokens: of one step; at least max_seqs, so that all may decode."""
        self.block_size, self.max_seqs, self.device = block_size, max_seqs, device
        self.width = -(-max_model_len // block_size)
        _, size = layout(max(max_tokens, max_seqs), max_seqs, self.width)
        cuda = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(2 if cuda else 1)]
        self._arrays = [buffer.numpy() for buffer in self._host]
        self._copied = [torch.cuda.Event() for _ in self._host] if cuda else []
        self._turn = 0
        self.buffer: torch.Tensor | None = None
        if cuda:
            self.stage()
        self.tables = np.zeros((max_seqs, self.width), dtype=np.int32)  # a row a request, kept from step to step
        self._rows: dict[int, tuple[int, list[int], int]] = {}  # request id -> (row of tables, blocks, how many stand)
        self._free = list(range(max_seqs))
        self._last: tuple = (), [], np.empty(0, np.intp), np.empty(0, np.intp)  # of the last step, see _table_rows

    def stage(self) -> None:
        """From now on Batches lie in one buffer on the device, and not where the host writes them."""
        self.buffer = torch.zeros_like(self._host[0], device=self.device)

    def seqs_of(self, tokens: int) -> int:
        """Rows for sequences in a padded step of ``tokens`` that is no decode step."""
        return min(tokens, self.max_seqs)

    def build(
        self, chunks: tuple[Chunk, ...], unread: Unread | None = None, pad_to: int = 0, pad_tokens: int = 0
    ) -> Batch:
        """The batch of ``chunks``, of at least one token each.

        unread: tokens sampled by the step before; they are read on the device, also where the host knows them already.
        pad_to: sequences (and tokens) of a decode step to fill up to, with rows that store nothing and attend to
        nothing. pad_tokens: tokens of another step to fill up to, with tokens of no sequence, and ``seqs_of`` that
        many sequences, with empty ones.
        """
        requests, starts, counts, samples = zip(*chunks, strict=True)
        longest = max(counts)
        decode = longest == 1
        seqs = self.seqs_of(pad_tokens) if pad_tokens else max(len(chunks), pad_to)
        tokens = pad_tokens or (seqs if decode else sum(counts))
        places, end = layout(tokens, seqs, self.width)
        if end > len(self._host[0]) or seqs > self.max_seqs:
            raise RuntimeError(f"a step of {tokens} tokens of {seqs} requests is more than this engine was built for")
        turn = self._turn
        self._turn = (turn + 1) % len(self._host)
        if self._copied:
            self._copied[turn].synchronize()  # two steps back: it has ended long ago, unless steps are very short
        array = self._arrays[turn]
        view = {name: array[begin:stop] for name, (begin, stop) in places.items()}
        self._fill(view, requests, starts, counts, samples, unread or Unread())
        buffer = self._send(turn, end)
        return self.views(buffer, tokens, seqs, sum(samples), longest, decode)

    def _send(self, turn: int, end: int) -> torch.Tensor:
        """Bring the first ``end`` elements to where the model reads them, behind the step that still reads there."""
        if self.buffer is None:
            return self._host[turn]
        self.buffer[:end].copy_(self._host[turn][:end], non_blocking=True)
        if self._copied:
            self._copied[turn].record()
        return self.buffer

    def views(self, buffer: torch.Tensor, tokens: int, seqs: int, wanted: int, max_q: int, decode: bool) -> Batch:
        """The Batch in ``buffer``, int32, in the layout of ``tokens`` and ``seqs``. wanted: how many rows of logits."""
        places, _ = layout(tokens, seqs, self.width)
        view = {name: buffer[begin:stop] for name, (begin, stop) in places.items()}
        view["tables"] = view["tables"].view(seqs, self.width)
        view["rows"] = view["rows"][:wanted]
        return Batch(**view, max_q=max_q, decode=decode)

    def _fill(self, view, requests, starts, counts, samples, unread) -> None:
        real, n, decode = len(requests), sum(counts), max(counts) == 1
        rows = self._table_rows(requests)
        first, count = np.array(starts, np.int32), np.array(counts, np.int32)
        bounds, ids, source = view["bounds"], view["ids"], view["source"]
        bounds[0] = 0
        np.cumsum(count, out=bounds[1 : real + 1])
        source[:] = -1
        if decode:
            positions, of = first, rows
            if unread.requests == requests and unread.positions == starts:
                # Decoding goes on as it was: every token is the one that the step before left in the same row.
                ids[:real], source[:real], unread = 0, np.arange(real), Unread()
            else:
                ids[:real] = [request.token_ids[start] for request, start in zip(requests, starts, strict=True)]
        else:
            for request, start, some, begin in zip(requests, starts, counts, bounds.tolist(), strict=False):
                ids[begin : begin + some] = request.token_ids[start : start + some]
            # token t of chunk i stands at start_i + (t - bounds_i)
            positions = np.arange(n, dtype=np.int32) + np.repeat(first - bounds[:real], count)
            of = np.repeat(rows, count)
        if unread:
            pairs = chain.from_iterable([unread.get(request.id) for request in requests])
            found = np.fromiter(pairs, np.int32, 2 * real).reshape(real, 2)
            offset = found[:, 0] - first  # of the unread token in its chunk
            here = (offset >= 0) & (offset < count)
            source[(bounds[:real] + offset)[here]] = found[here, 1]
        pending = ids[:n] < 0
        if pending.any():
            if (source[:n][pending] < 0).any():
                raise RuntimeError("a step reads a token that no step before it has sampled")
            ids[:n][pending] = 0  # PENDING is no row of the embedding; the token buffer answers for it
        view["positions"][:n] = positions
        size = self.block_size
        view["slots"][:n] = self.tables[of, positions // size] * size + positions % size
        np.add(first, count, out=view["seq_lens"][:real])
        # Padding is written in every step: what a larger batch left here would be a stale row.
        ids[n:], view["positions"][n:], view["slots"][n:], view["seq_lens"][real:] = 0, 0, -1, 0
        bounds[real + 1 :] = np.arange(n + 1, n + 1 + len(bounds) - real - 1) if decode else n
        wanted = np.array(samples, bool)
        some = np.count_nonzero(wanted)
        view["rows"][:some], view["rows"][some:] = bounds[1 : real + 1][wanted] - 1, 0
        tables = view["tables"].reshape(-1, self.width)
        np.take(self.tables, rows, axis=0, out=tables[:real], mode="clip")  # "raise" would copy once more
        tables[real:] = 0

    def _table_rows(self, requests: tuple[Request, ...]) -> np.ndarray:
        """Each request's row of ``tables``, brought up to date.

        A list of blocks only grows; where a block is exchanged, the request gets another list. So a table is right if
        it was written from this list and the list is as long as then, and mostly there is one entry to write.
        """
        last, last_blocks, lengths, rows = self._last
        blocks = [request.blocks for request in requests]
        now = np.fromiter(map(len, blocks), np.intp, len(blocks))
        if requests == last and all(map(is_, blocks, last_blocks)):
            changed = np.nonzero(now != lengths)[0].tolist()
        else:
            changed, rows = range(len(requests)), np.empty(len(requests), np.intp)
        for i in changed:
            rows[i] = self._table_row(requests[i], requests)
        self._last = requests, blocks, now, rows
        return rows

    def _table_row(self, request: Request, requests: tuple[Request, ...]) -> int:
        blocks = request.blocks
        row, known, same = self._rows.get(request.id) or (self._free_row(requests), None, 0)
        if known is not blocks or same != len(blocks):
            if known is not blocks:
                same = 0
                self.tables[row, len(blocks) :] = 0
            self.tables[row, same : len(blocks)] = blocks[same:]
            self._rows[request.id] = row, blocks, len(blocks)
        return row

    def _free_row(self, requests: tuple[Request, ...]) -> int:
        """A row that no request of this step has."""
        if not self._free:
            here = {request.id for request in requests}
            for gone in [id for id in self._rows if id not in here]:
                self._free.append(self._rows.pop(gone)[0])
        return self._free.pop()


def to_device(values, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A small list or tuple of numbers on the device. The host does not wait: it is copied from pinned memory, which
    torch does not hand out again before the copy has ended."""
    cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=cuda).to(device, non_blocking=True)
