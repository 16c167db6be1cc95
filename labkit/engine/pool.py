"""The pool of KV blocks: who holds which, which are free, and which still hold a prefix worth finding again.

A block is in one of three states, and their counts always add up to ``num_blocks - 1``:

    used     in at least one block table; ``ref`` counts the tables
    cached   in none, but its tokens are known and it can be found again; it is evicted when its turn comes
    free     in none, and nothing in it is of use

Cached and free blocks wait in one queue, in the order in which they will be handed out: free ones at the front, then
cached ones from the longest unused to the newest. The queue is a ring of ``prev`` and ``next`` entries, so a hit takes
a block out of its middle in O(1). Block 0 is the null block: padding points at it, no table ever gets it, and in the
ring it marks where the end meets the beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from labkit.errors import LabError

NULL_BLOCK = 0


class Prefix:
    """A whole prefix of full blocks, known by its last block's tokens and the prefix before it. ``blocks`` hold those
    tokens: several, where requests computed them side by side, since a table in use is never rewritten."""

    __slots__ = ("key", "blocks")

    def __init__(self, key: tuple[Hashable, tuple[int, ...]]):
        self.key = key
        self.blocks: list[int] = []


@dataclass
class PoolStats:
    """queries, hits: tokens looked up in the prefix cache, and found there, over first admissions. resumed_queries,
    resumed_hits: the same for requests that come back after a preemption, which would flatter the hit rate.
    evictions: cached blocks that were given to others."""

    queries: int = 0
    hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """hits / queries; nan before the first query."""
        return self.hits / self.queries if self.queries else float("nan")


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, the null block included.

    Raises LabError unless block_size is a power of two from 1 to 256 and num_blocks at least 2.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True):
        if not isinstance(block_size, int) or not 1 <= block_size <= 256 or block_size & (block_size - 1):
            raise LabError(f"block_size must be a power of two from 1 to 256, got {block_size!r}")
        if not isinstance(num_blocks, int) or num_blocks < 2:
            raise LabError(f"num_blocks must be at least 2 (block 0 is for padding), got {num_blocks!r}")
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.shift = block_size.bit_length() - 1
        self.stats = PoolStats()
        self.ref = [0] * num_blocks
        self._prefix: list[Prefix | None] = [None] * num_blocks
        self._prefixes: dict[tuple, Prefix] = {}
        self._next = [(b + 1) % num_blocks for b in range(num_blocks)]
        self._prev = [(b - 1) % num_blocks for b in range(num_blocks)]
        self.num_available = num_blocks - 1  # free or cached: what allocate can hand out
        self.num_cached = 0
        self.log: list[tuple[str, int]] | None = None  # if a list: ("keep" | "evict", block) as they happen
        self.on_reset: Callable[[], None] | None = None  # told when the prefix cache is reset, which no request causes

    @property
    def total(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self.num_available - self.num_cached

    @property
    def num_used(self) -> int:
        return self.total - self.num_available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def queue(self) -> list[int]:
        """The free and cached blocks, in the order in which they will be handed out."""
        order, block = [], self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(order) < self.num_blocks:  # a broken queue may go in circles
            order.append(block)
            block = self._next[block]
        return order

    # ---- handing out and taking back

    def allocate(self, n: int) -> list[int]:
        """n blocks for one table. A cached one is evicted: whoever asks for its prefix from now on will not find it.

        Raises LabError, with nothing changed, if fewer than n are free or cached.
        """
        if n > self.num_available:
            raise LabError(f"{n} blocks are needed, and the pool has {self.num_available} free or cached")
        blocks = []
        for _ in range(n):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            if self._prefix[block] is not None:
                self._forget(block)
                self.stats.evictions += 1
            self.ref[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Take back one table's hold on its blocks.

        Cached ones go to the back of the queue from the last to the first, so that a sequence loses its tail before its
        head: a prefix without its beginning cannot be found. Free ones go to the front, the last of the table foremost.
        Raises LabError if a block is held by no table (it was freed twice).
        """
        for block in reversed(blocks):
            if self.ref[block] < 1:
                raise LabError(f"block {block} is freed, and no table holds it")
            self.ref[block] -= 1
            if not self.ref[block] and self._prefix[block] is not None:
                self._link(block, self._prev[NULL_BLOCK])
        for block in blocks:
            if not self.ref[block] and self._prefix[block] is None:
                self._link(block, NULL_BLOCK)

    def touch(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks. Those in the queue leave it."""
        for block in blocks:
            if not self.ref[block]:
                self._unlink(block)
            self.ref[block] += 1

    def num_queued(self, blocks: Iterable[int]) -> int:
        """How many of these lie in the queue. ``num_available`` counts them, and ``touch`` will take them out of it."""
        return sum(not self.ref[block] for block in blocks)

    # ---- sharing

    def fork(self, blocks: Sequence[int]) -> list[int]:
        """A second table of the same blocks. Before its owner writes into the last one it must ``unshare`` it."""
        self.touch(blocks)
        return list(blocks)

    def must_copy(self, block: int) -> bool:
        """Whether a table must not write into this block: another one holds it, or the prefix cache promises it."""
        return self.ref[block] > 1 or self._prefix[block] is not None

    def unshare(self, blocks: list[int], index: int) -> tuple[int, int] | None:
        """Make blocks[index] the table's own. -> (source, destination) to be copied, or None if it already is."""
        source = blocks[index]
        if not self.must_copy(source):
            return None
        blocks[index] = self.allocate(1)[0]
        self.free([source])
        return source, blocks[index]

    # ---- the prefix cache

    def match(self, tokens: Sequence[int], root: Hashable = None) -> tuple[list[int], Hashable]:
        """The longest cached prefix of ``tokens`` -> (its blocks, what to pass to ``register`` for the next one).

        At most n - 1 of n tokens count: the last must be computed, since its logits are wanted. root: requests with
        different roots share nothing. The blocks are only named; ``touch`` takes them.

        The key of a prefix is (prefix before it, tokens), and Python's dict compares keys wherever hashes agree: two
        texts whose hashes collide are told apart.
        """
        blocks, prefix, size = [], ("root", root), self.block_size
        if self.prefix_caching:
            for start in range(0, (len(tokens) - 1) // size * size, size):
                found = self._prefixes.get((prefix, tuple(tokens[start : start + size])))
                if found is None:
                    break
                prefix = found
                blocks.append(found.blocks[0])
        return blocks, prefix

    def register(self, block: int, tokens: Sequence[int], prefix: Hashable) -> Hashable:
        """Let ``block``, which follows ``prefix``, be found by its tokens -> the prefix that it ends.

        Call it for full blocks, after the step that computed them. prefix: what ``match`` or ``register`` returned for
        the block before. A second block with the same tokens is kept beside the first: when one is evicted, the other
        is still found. Two tables that share a block may both register it. Raises LabError for a block that is not
        full, is not in use, or is registered with other tokens.
        """
        if not self.prefix_caching:
            return prefix
        key, known = (prefix, tuple(tokens)), self._prefix[block]
        if known is not None and known.key == key:
            return known
        if len(tokens) != self.block_size or not self.ref[block] or known is not None:
            state = f"{len(tokens)} of {self.block_size} tokens, {self.ref[block]} tables hold it"
            raise LabError(
                f"block {block} cannot be registered: {state}{', it has other tokens' * (known is not None)}"
            )
        entry = self._prefixes.get(key)
        if entry is None:
            entry = self._prefixes[key] = Prefix(key)
        entry.blocks.append(block)
        self._prefix[block] = entry
        if self.log is not None:
            self.log.append(("keep", block))
        return entry

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, for a benchmark that must start cold. Tables in use keep their blocks."""
        if self.on_reset is not None:
            self.on_reset()
        for block in [b for b in range(1, self.num_blocks) if self._prefix[b] is not None]:
            queued = not self.ref[block]
            if queued:
                self._unlink(block)
            self._forget(block)
            if queued:
                self._link(block, NULL_BLOCK)

    def _forget(self, block: int) -> None:
        entry = self._prefix[block]
        self._prefix[block] = None
        entry.blocks.remove(block)
        if not entry.blocks:
            del self._prefixes[entry.key]
        if self.log is not None:
            self.log.append(("evict", block))

    # ---- the queue

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_available -= 1
        self.num_cached -= self._prefix[block] is not None

    def _link(self, block: int, before: int) -> None:
        """Put ``block`` behind ``before``: the null block's neighbours are the queue's front and back."""
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_available += 1
        self.num_cached += self._prefix[block] is not None

    # ---- proof

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Prove that the pool is whole. Raises LabError with what is wrong.

        tables: every block table there is, to be compared with the counts of references; None: these are believed.
        """
        held = Counter(block for table in tables for block in table) if tables is not None else self.ref
        queue, wrong = self.queue(), []
        if held[NULL_BLOCK]:
            wrong.append(f"{held[NULL_BLOCK]} table entries name the null block")
        for block in range(1, self.num_blocks):
            if self.ref[block] != held[block]:
                wrong.append(f"block {block} counts {self.ref[block]} tables, and {held[block]} hold it")
        if len(set(queue)) != len(queue) or any(self._prev[self._next[b]] != b for b in (NULL_BLOCK, *queue)):
            wrong.append(f"the queue is broken: {queue}")
        if lost := {b for b in range(1, self.num_blocks) if not self.ref[b]} ^ set(queue):
            wrong.append(f"blocks {sorted(lost)} are queued and held at once, or neither")
        cached = sum(self._prefix[b] is not None for b in queue)
        used = sum(bool(r) for r in self.ref)
        if (len(queue), cached) != (self.num_available, self.num_cached) or used + len(queue) != self.total:
            wrong.append(
                f"{len(queue) - cached} free + {cached} cached + {used} used = {len(queue) + used} of {self.total}; "
                f"counted: {self.num_free} free, {self.num_cached} cached"
            )
        named = {b: entry for entry in self._prefixes.values() for b in entry.blocks}
        if named != {b: entry for b, entry in enumerate(self._prefix) if entry is not None}:
            wrong.append("the prefix cache and the blocks disagree on what is cached")
        if any(entry.key != key or not entry.blocks for key, entry in self._prefixes.items()):
            wrong.append("a prefix is kept under a key that is not its own, or without a block")
        if wrong:
            raise LabError("the pool is not whole: " + "; ".join(wrong))
