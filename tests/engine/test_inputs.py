"""What the model reads in a step: every number of small batches, and what an earlier step must not leave behind."""

import numpy as np
import pytest
import torch

from labkit.engine.inputs import ALIGN, InputBuilder, Unread, layout
from labkit.engine.request import PENDING, Request
from labkit.engine.step import Chunk

CPU = torch.device("cpu")


def request(id, tokens, blocks):
    made = Request(id, list(range(10 * id, 10 * id + tokens)))
    made.blocks = list(blocks)
    return made


def builder(**changes):
    return InputBuilder(**(dict(block_size=4, max_seqs=4, max_tokens=32, max_model_len=18, device=CPU) | changes))


def as_lists(batch):
    return {name: getattr(batch, name).tolist() for name in ("ids", "source", "positions", "slots", "seq_lens", "rows")}


def test_a_mixed_step_is_packed_as_the_page_says():
    a, b, c = request(1, 6, [5, 2]), request(2, 9, [7, 3, 9]), request(3, 1, [4])
    batch = builder().build((Chunk(a, 5, 1, True), Chunk(b, 2, 4, False), Chunk(c, 0, 1, True)))
    assert as_lists(batch) == dict(
        ids=[15, 22, 23, 24, 25, 30],
        source=[-1] * 6,
        positions=[5, 2, 3, 4, 5, 0],
        slots=[2 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 3 * 4, 3 * 4 + 1, 4 * 4],
        seq_lens=[6, 6, 1],  # b's is 6, not 9: a chunk sees nothing behind its end
        rows=[0, 5],
    )
    assert batch.bounds.tolist() == [0, 1, 5, 6] and batch.max_q == 4 and not batch.decode
    assert batch.tables.tolist() == [[5, 2, 0, 0, 0], [7, 3, 9, 0, 0], [4, 0, 0, 0, 0]]  # ceil(18 / 4) columns


def test_a_decode_step_is_the_same_with_one_token_each():
    a, b = request(1, 6, [5, 2]), request(2, 9, [7, 3, 9])
    batch = builder().build((Chunk(a, 5, 1, True), Chunk(b, 8, 1, True)))
    assert as_lists(batch) == dict(
        ids=[15, 28], source=[-1, -1], positions=[5, 8], slots=[9, 36], seq_lens=[6, 9], rows=[0, 1]
    )
    assert batch.decode and batch.max_q == 1


def test_padding_rows_are_valid_and_written_anew_in_every_step():
    """A full batch of long tables first, so that everything a smaller one does not overwrite is stale."""
    inputs = builder()
    full = [request(i, 17, range(1 + 5 * i, 6 + 5 * i)) for i in range(4)]
    inputs.build(tuple(Chunk(r, 16, 1, True) for r in full), Unread(tuple(full), (16, 16, 16, 16)))
    batch = inputs.build((Chunk(full[2], 15, 1, True),), pad_to=4)
    assert as_lists(batch) == dict(
        ids=[35, 0, 0, 0], source=[-1] * 4, positions=[15, 0, 0, 0], slots=[14 * 4 + 3, -1, -1, -1],
        seq_lens=[16, 0, 0, 0], rows=[0],
    )  # fmt: skip
    assert batch.bounds.tolist() == [0, 1, 2, 3, 4]
    assert batch.tables[1:].eq(0).all() and batch.tables[0].tolist() == [11, 12, 13, 14, 15]


def test_a_token_the_host_does_not_know_is_read_from_the_buffer():
    a, b = request(1, 5, [1, 2]), request(2, 3, [3])
    a.token_ids[4] = PENDING
    sampled = Unread((request(7, 1, []), b, a), (0, 9, 4))
    batch = builder().build((Chunk(a, 4, 1, True), Chunk(b, 2, 1, True)), sampled)
    assert batch.source.tolist() == [2, -1] and batch.ids.tolist() == [0, 22]  # b's chunk does not hold position 9
    batch = builder().build((Chunk(b, 0, 3, True), Chunk(a, 2, 3, True)), Unread((a,), (4,)))
    assert batch.source.tolist() == [-1] * 5 + [0], "the last token of a recomputed chunk"
    with pytest.raises(RuntimeError, match="reads a token that no step before it has sampled"):
        builder().build((Chunk(a, 4, 1, True),))


def test_a_token_that_waits_at_another_place_is_not_read():
    """The same requests as in the step before, but computed again from further back."""
    a, b = request(1, 6, [1, 2]), request(2, 6, [3, 4])
    batch = builder().build((Chunk(a, 2, 1, False), Chunk(b, 5, 1, True)), Unread((a, b), (5, 5)))
    assert batch.source.tolist() == [-1, 1] and batch.ids.tolist()[0] == 12


def test_a_table_grows_in_place_and_is_written_anew_after_a_preemption():
    inputs, a = builder(), request(1, 17, [1, 2])
    assert inputs.build((Chunk(a, 4, 1, False),)).tables.tolist() == [[1, 2, 0, 0, 0]]
    a.blocks += [3, 4]
    assert inputs.build((Chunk(a, 12, 1, False),)).tables.tolist() == [[1, 2, 3, 4, 0]]
    a.blocks = [9]
    batch = inputs.build((Chunk(a, 0, 3, False),))
    assert batch.tables.tolist() == [[9, 0, 0, 0, 0]] and batch.slots.tolist() == [36, 37, 38]
    a.blocks = [9, 8]  # as long as a table it had before, with other blocks
    assert inputs.build((Chunk(a, 4, 1, False),)).slots.tolist() == [32]
    a.blocks = [9, 7]  # a copied block takes the place of a shared one
    assert inputs.build((Chunk(a, 4, 1, False),)).slots.tolist() == [28]


@pytest.mark.parametrize("end", [18, 12])
def test_decoding_that_goes_on_gives_what_a_new_builder_gives(end):
    """Most steps differ from the last by one token a request, and are built from it; every 4th has a new block."""
    inputs, requests = builder(), [request(i, 8 + i, range(1 + 5 * i, 4 + 5 * i)) for i in range(3)]
    for step in range(8, end - 2):
        for i, r in enumerate(requests):
            while len(r.blocks) * 4 < step + i + 1:
                r.blocks.append(1 + 5 * i + len(r.blocks))
            if len(r.token_ids) == step + i:
                r.token_ids.append(PENDING)
        chunks = tuple(Chunk(r, step + i, 1, True) for i, r in enumerate(requests))
        unread = Unread(tuple(requests), tuple(c.start for c in chunks))
        batch, fresh = inputs.build(chunks, unread), builder().build(chunks, unread)
        assert as_lists(batch) == as_lists(fresh) and torch.equal(batch.tables, fresh.tables)
        assert batch.source.tolist() == [0, 1, 2] and batch.positions.tolist() == [c.start for c in chunks]
    requests[1].blocks = [40, 41, 42, 43, 44]  # preempted, and back with other blocks
    batch = inputs.build(chunks, unread)
    assert batch.tables[1].tolist() == [40, 41, 42, 43, 44] and torch.equal(batch.tables[0], fresh.tables[0])
    at = unread.positions
    others = Unread((requests[1], requests[0], requests[2]), (at[1], at[0], at[2]))
    assert inputs.build(chunks[1:], others).source.tolist() == [0, 2], "rows are those of the step before"


def test_rows_of_requests_that_are_gone_are_used_again():
    inputs = builder(max_seqs=2)
    for i in range(20):
        a, b = request(2 * i, 3, [i + 1]), request(2 * i + 1, 3, [i + 30])
        batch = inputs.build((Chunk(a, 0, 3, True), Chunk(b, 0, 3, True)))
        assert batch.tables[:, 0].tolist() == [i + 1, i + 30] and batch.tables[:, 1:].eq(0).all()
    assert len(inputs._rows) == 2


def test_the_arrays_begin_at_multiples_of_16_bytes_and_do_not_overlap():
    for tokens, seqs, width in ((1, 1, 1), (3, 3, 5), (33, 7, 2), (4, 4, 4)):
        places, end = layout(tokens, seqs, width)
        spans = sorted(places.values())
        assert all(begin % ALIGN == 0 for begin, _ in spans) and spans[-1][1] <= end
        assert all(stop <= begin for (_, stop), (begin, _) in zip(spans, spans[1:], strict=False))


def test_random_steps_against_a_plain_loop():
    rng = np.random.default_rng(0)
    inputs = builder(block_size=2, max_seqs=5, max_tokens=64, max_model_len=20)
    for _ in range(200):
        chunks = []
        for i in range(rng.integers(1, 6)):
            r = request(int(rng.integers(0, 9)) * 10 + i, int(rng.integers(1, 20)), rng.permutation(40)[:10].tolist())
            start = int(rng.integers(0, r.num_tokens))
            chunks.append(Chunk(r, start, int(rng.integers(1, min(12, r.num_tokens - start) + 1)), bool(i % 2)))
        batch = inputs.build(tuple(chunks))
        at = [(c.request, c.start + t) for c in chunks for t in range(c.count)]
        assert batch.ids.tolist() == [r.token_ids[p] for r, p in at]
        assert batch.positions.tolist() == [p for _, p in at]
        assert batch.slots.tolist() == [r.blocks[p // 2] * 2 + p % 2 for r, p in at]
        assert batch.seq_lens.tolist() == [c.start + c.count for c in chunks]
        ends = np.cumsum([c.count for c in chunks])
        assert batch.bounds.tolist() == [0, *ends] and batch.tables[:, :10].tolist() == [
            c.request.blocks for c in chunks
        ]
        assert batch.rows.tolist() == [e - 1 for c, e in zip(chunks, ends, strict=True) if c.samples]
        assert batch.decode == all(c.count == 1 for c in chunks)


def test_more_than_the_engine_was_built_for_is_refused():
    inputs = builder(max_seqs=2, max_tokens=8)
    many = tuple(Chunk(request(i, 1, [1]), 0, 1, True) for i in range(3))
    with pytest.raises(RuntimeError, match="a step of 3 tokens of 3 requests is more than this engine was built for"):
        inputs.build(many)
