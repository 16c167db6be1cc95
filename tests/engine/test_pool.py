"""The pool: exact queue orders, prefix hits, sharing, and a proof that finds every kind of damage."""

import pytest

from labkit.engine.host_pool import HostPool
from labkit.engine.pool import BlockPool
from labkit.errors import LabError

ROOT = ("root", None)


def registered(pool: BlockPool, blocks: list[int], tokens, root=None) -> None:
    prefix = ("root", root)
    for i, block in enumerate(blocks):
        prefix = pool.register(block, tokens[i * pool.block_size : (i + 1) * pool.block_size], prefix)


@pytest.mark.parametrize("size", [0, 3, 12, 512, -4, 4.0])
def test_block_sizes_that_are_no_power_of_two(size):
    with pytest.raises(LabError, match="power of two"):
        BlockPool(8, size)


def test_a_pool_needs_a_block_beside_the_null_block():
    with pytest.raises(LabError, match="at least 2"):
        BlockPool(1, 4)
    assert BlockPool(2, 4).allocate(1) == [1]


def test_blocks_come_in_order_and_never_the_null_block():
    pool = BlockPool(6, 4)
    assert pool.queue() == [1, 2, 3, 4, 5]
    assert pool.allocate(3) == [1, 2, 3] and pool.queue() == [4, 5]
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.total) == (2, 0, 3, 5)


def test_asking_for_too_many_changes_nothing():
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    with pytest.raises(LabError, match="2 blocks are needed, and the pool has 1"):
        pool.allocate(2)
    pool.check([table])
    assert pool.queue() == [3]


def test_blocks_without_a_prefix_go_to_the_front_the_last_one_foremost():
    pool = BlockPool(8, 4)
    table = pool.allocate(3)
    pool.free(table)
    assert pool.queue() == [3, 2, 1, 4, 5, 6, 7]


def test_cached_blocks_go_to_the_back_and_lose_the_tail_first():
    pool = BlockPool(8, 2)
    table = pool.allocate(4)  # three full blocks and a part
    registered(pool, table[:3], [1, 2, 3, 4, 5, 6])
    pool.free(table)
    assert pool.queue() == [4, 5, 6, 7, 3, 2, 1]
    assert (pool.num_free, pool.num_cached) == (4, 3)
    assert pool.allocate(5) == [4, 5, 6, 7, 3], "the tail of the sequence goes before its head"
    assert pool.match([1, 2, 3, 4, 5, 6, 7])[0] == [1, 2]


def test_a_hit_moves_blocks_to_the_end_of_the_line():
    """Two sequences, the older one is used again: the other is evicted first."""
    pool = BlockPool(5, 2)
    a = pool.allocate(2)
    registered(pool, a, [1, 1, 1, 1])
    b = pool.allocate(2)
    registered(pool, b, [2, 2, 2, 2])
    pool.free(a)
    pool.free(b)
    assert pool.queue() == [2, 1, 4, 3]
    hits, _ = pool.match([1, 1, 1, 1, 1])
    pool.touch(hits)
    assert pool.queue() == [4, 3]
    pool.free(hits)
    assert pool.queue() == [4, 3, 2, 1]
    pool.check([])


def test_free_touch_free_evict_keeps_queue_and_cache_in_step():
    pool = BlockPool(3, 1)
    (block,) = table = pool.allocate(1)
    registered(pool, table, [7])
    for _ in range(3):
        pool.free(table)
        pool.touch([block])
        pool.check([table])
    pool.free(table)
    assert pool.allocate(2) == [2, 1] and pool.match([7, 8])[0] == []
    assert pool.stats.evictions == 1


def test_an_evicted_block_is_not_found_under_its_old_tokens():
    pool = BlockPool(2, 2)
    table = pool.allocate(1)
    registered(pool, table, [1, 2])
    pool.free(table)
    table = pool.allocate(1)
    assert pool.match([1, 2, 3])[0] == []
    registered(pool, table, [8, 9])
    assert pool.match([1, 2, 3])[0] == [] and pool.match([8, 9, 3])[0] == table
    pool.check([table])


@pytest.mark.parametrize(("tokens", "hits"), [(8, 1), (9, 2), (4, 0), (5, 1), (1, 0), (0, 0), (7, 1)])
def test_the_last_token_is_never_a_hit(tokens, hits):
    """Of n tokens at most n - 1 may come from the cache, or there would be no logits."""
    pool = BlockPool(8, 4)
    registered(pool, pool.allocate(2), [5] * 8)
    assert len(pool.match([5] * tokens)[0]) == hits


def test_only_full_blocks_in_use_are_registered_and_once():
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    with pytest.raises(LabError, match="3 of 4 tokens"):
        pool.register(block, [1, 2, 3], ROOT)
    with pytest.raises(LabError, match="0 tables"):
        pool.register(2, [1, 2, 3, 4], ROOT)
    first = pool.register(block, [1, 2, 3, 4], ROOT)
    assert pool.register(block, [1, 2, 3, 4], ROOT) is first, "two tables that share it may both say so"
    with pytest.raises(LabError, match="other tokens"):
        pool.register(block, [1, 2, 3, 5], ROOT)


def test_the_same_tokens_behind_another_prefix_are_another_block():
    pool = BlockPool(8, 2)
    a, b = pool.allocate(2), pool.allocate(2)
    registered(pool, a, [1, 1, 3, 3])
    registered(pool, b, [2, 2, 3, 3])
    assert pool.match([1, 1, 3, 3, 0])[0] == a and pool.match([2, 2, 3, 3, 0])[0] == b
    assert pool.match([3, 3, 3, 3, 0])[0] == []


def test_a_hash_collision_is_no_hit():
    """Python hashes an int modulo 2**61 - 1, so these two prompts have equal hashes all the way down."""
    twin = 2**61 - 1
    assert hash((ROOT, (0, 5))) == hash((ROOT, (twin, 5)))
    pool = BlockPool(8, 2)
    table = pool.allocate(1)
    registered(pool, table, [0, 5])
    assert pool.match([twin, 5, 1])[0] == [] and pool.match([0, 5, 1])[0] == table


def test_roots_keep_domains_apart():
    pool = BlockPool(8, 2)
    table = pool.allocate(1)
    registered(pool, table, [1, 2], root=("x", None))
    assert pool.match([1, 2, 3], ("x", None))[0] == table
    for other in (None, (None, "x"), ("x", "x"), "x", ("y", None)):
        assert pool.match([1, 2, 3], other)[0] == []


def test_one_of_two_equal_blocks_survives_the_other():
    """Two requests computed the same prompt side by side; the block of the first is given to someone else."""
    pool = BlockPool(3, 2)
    a, b = pool.allocate(1), pool.allocate(1)
    registered(pool, a, [1, 2])
    registered(pool, b, [1, 2])
    pool.check([a, b])
    pool.free(a)
    assert pool.allocate(1) == a
    assert pool.match([1, 2, 3])[0] == b
    pool.check([a, b])


def test_hits_in_the_queue_are_told_apart_from_hits_in_use():
    pool = BlockPool(6, 1)
    table = pool.allocate(3)
    registered(pool, table, [1, 2, 3])
    pool.free(table[1:])  # the first stays in use
    hits, _ = pool.match([1, 2, 3, 4])
    assert hits == [1, 2, 3] and pool.num_queued(hits) == 2 and pool.num_available == 4


def test_without_prefix_caching_nothing_is_found():
    pool = BlockPool(4, 2, prefix_caching=False)
    table = pool.allocate(1)
    registered(pool, table, [1, 2])
    pool.free(table)
    assert pool.match([1, 2, 3])[0] == [] and pool.num_cached == 0


def test_a_fork_shares_until_it_writes():
    pool = BlockPool(8, 4)
    parent = pool.allocate(2)
    child = pool.fork(parent)
    assert child == parent and child is not parent and pool.num_used == 2
    assert pool.unshare(child, 1) == (2, 3) and child == [1, 3]
    assert pool.unshare(child, 1) is None, "it is the child's own now"
    pool.check([parent, child])
    pool.free(parent)
    assert pool.num_used == 2 and pool.unshare(child, 0) is None
    pool.free(child)
    pool.check([])


def test_a_block_that_the_cache_promises_is_copied_even_if_nobody_else_holds_it():
    """The fork's parent filled the block, registered it and left. Writing into it would change a cached prefix."""
    pool = BlockPool(4, 2)
    parent = pool.allocate(1)
    child = pool.fork(parent)
    registered(pool, parent, [1, 2])
    pool.free(parent)
    assert pool.must_copy(child[0]) and pool.unshare(child, 0) == (1, 2)
    assert pool.match([1, 2, 3])[0] == [1] and pool.num_cached == 1
    pool.check([child])


def test_freeing_twice_is_found():
    pool = BlockPool(4, 2)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(LabError, match="block 1 is freed"):
        pool.free(table)


def test_a_cold_start_forgets_all_prefixes_and_no_table():
    pool = BlockPool(6, 2)
    a, b = pool.allocate(2), pool.allocate(1)
    registered(pool, a, [1, 2, 3, 4])
    registered(pool, b, [5, 6])
    pool.free(a)
    pool.reset_prefix_cache()
    assert pool.match([1, 2, 3])[0] == [] and pool.match([5, 6, 7])[0] == [] and pool.num_cached == 0
    assert pool.queue() == [2, 1, 4, 5], "they are free now, and free blocks are at the front"
    pool.check([b])


def damage_ref(pool):
    pool.ref[1] += 1


def damage_queue(pool):
    pool._next[3] = 5


def damage_count(pool):
    pool.num_cached += 1


def damage_state(pool):
    pool._unlink(4)


def damage_hash(pool):
    pool._prefixes.clear()


def damage_stale(pool):
    pool._prefix[2] = None


def damage_circle(pool):
    pool._next[5] = 5


@pytest.mark.parametrize(
    "damage",
    [damage_ref, damage_queue, damage_count, damage_state, damage_hash, damage_stale, damage_circle],
    ids=lambda f: f.__name__,
)
def test_the_proof_finds_damage(damage):
    pool = BlockPool(8, 2)
    table = pool.allocate(2)
    registered(pool, table, [1, 2, 3, 4])
    pool.check([table])
    pool.check()
    damage(pool)
    with pytest.raises(LabError, match="not whole"):
        pool.check([table])
    if damage is not damage_ref:  # a count of references is believed
        with pytest.raises(LabError, match="not whole"):
            pool.check()


@pytest.mark.parametrize("tables", [[], [[1, 2], [1]], [[1]], [[1, 3]], [[1, 2, 0]]])
def test_the_proof_needs_exactly_the_tables_there_are(tables):
    pool = BlockPool(8, 2)
    pool.allocate(2)
    with pytest.raises(LabError, match="not whole"):
        pool.check(tables)


def test_the_host_pool():
    pool = HostPool(3)
    table = pool.allocate(2)
    pool.check([table])
    with pytest.raises(LabError, match="2 host blocks are needed, and 1 are free"):
        pool.allocate(2)
    with pytest.raises(LabError, match="not whole"):
        pool.check([table, table])
    pool.free(table)
    assert pool.num_available == 3
    pool.check([])
