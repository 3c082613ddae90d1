"""A block is in exactly one of free, in use, cached, fenced; it is handed out only after the step that last touched it.

61 (device part), 53: any order of operations, the checker after each one. 55, 66: a match compares ids and prefixes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_proc.blocks import BROKEN, ROOT, BlockPool, PoolError
from wire.keys import block_keys

TOKENS = 4
BLOCKS = 12


def raw(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ids)


@dataclass
class User:
    """A sequence as far as the pool sees it: its blocks, of which `entered` are in the index under `chain`."""

    ids: list[int]
    keys: list[bytes]
    blocks: list[int]
    entered: int
    chain: int
    touched: int = 0  # the last launched step that used its blocks


@dataclass
class Simulation:
    """Random users of one pool, and a model of what each block holds: `content[b]` is the prefix that ends in it."""

    key_bits: int
    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS, TOKENS))
    users: list[User] = field(default_factory=list)
    content: dict[int, list[int]] = field(default_factory=dict)
    touched: dict[int, int] = field(default_factory=dict)  # block → last launched step that uses it
    handed_out: int = 0
    hits: int = 0

    def check(self) -> None:
        self.pool.check([user.blocks for user in self.users])
        assert self.pool.available() + self.pool.coming() <= BLOCKS

    def arrive(self, source: random.Random) -> None:
        ids = [source.randrange(2) for _ in range(TOKENS * source.randint(1, 4))]
        keys = block_keys(b"root", raw(ids), TOKENS, self.key_bits)
        match = self.pool.match(keys, raw(ids), source.randint(0, len(keys)))
        for number, block in enumerate(match.blocks):
            assert self.content[block] == ids[: TOKENS * (number + 1)], "a match with other ids"
        need = len(keys) - len(match.blocks)
        if need + self.pool.idle_among(match.blocks) > self.pool.available():
            return
        self.pool.acquire(match.blocks)
        fresh = self.pool.allocate(need)
        for block in fresh:
            assert self.touched.get(block, 0) <= self.pool.completed, "handed out while a step may touch it"
            self.content.pop(block, None)
        self.handed_out += need
        self.hits += len(match.blocks)
        self.users.append(User(ids, keys, match.blocks + fresh, len(match.blocks), match.chain))

    def launch(self) -> None:
        step = self.pool.launch()
        for user in self.users:
            user.touched = step
            self.touched.update(dict.fromkeys(user.blocks, step))

    def complete(self, source: random.Random) -> None:
        if self.pool.completed == self.pool.launched:
            return
        self.pool.complete(source.randint(self.pool.completed + 1, self.pool.launched))
        for user in self.users:
            if user.touched and user.touched <= self.pool.completed and source.random() < 0.7:
                self.enter(user)

    def enter(self, user: User) -> None:
        for number in range(user.entered, len(user.blocks)):
            if user.chain == BROKEN:
                return
            ids = user.ids[TOKENS * number : TOKENS * (number + 1)]
            self.content[user.blocks[number]] = user.ids[: TOKENS * (number + 1)]
            user.chain = self.pool.enter(user.blocks[number], user.keys[number], raw(ids), user.chain)
            user.entered = number + 1

    def leave(self, source: random.Random) -> None:
        if self.users:
            user = self.users.pop(source.randrange(len(self.users)))
            self.pool.release(user.blocks)

    def step(self, source: random.Random) -> None:
        choice = source.random()
        if choice < 0.3:
            self.arrive(source)
        elif choice < 0.5:
            self.launch()
        elif choice < 0.75:
            self.complete(source)
        elif choice < 0.95:
            self.leave(source)
        elif choice < 0.98 and self.users:
            self.pool.drop(source.choice(self.users).blocks)
        else:
            self.pool.flush()
        self.check()


@pytest.mark.parametrize("key_bits", [256, 8, 2])
def test_61_ten_thousand_random_operations(key_bits: int) -> None:
    source = random.Random(key_bits)
    simulation = Simulation(key_bits)
    for _ in range(10_000):
        simulation.step(source)
    assert simulation.handed_out > 1000
    assert simulation.hits > 100
    assert simulation.pool.evictions > 50
    for user in list(simulation.users):
        simulation.users.remove(user)
        simulation.pool.release(user.blocks)
    simulation.pool.complete(simulation.pool.launched)
    counts = simulation.pool.counts()
    assert counts.free + counts.cached == BLOCKS


@given(seed=st.integers(0, 2**32), key_bits=st.sampled_from([256, 4, 1]), length=st.integers(1, 200))
def test_61_any_order_of_operations(seed: int, key_bits: int, length: int) -> None:
    source = random.Random(seed)
    simulation = Simulation(key_bits)
    for _ in range(length):
        simulation.step(source)


def entered(pool: BlockPool, ids: list[int], key: str = "k") -> list[int]:
    """Blocks of these ids, computed and in the index, used by nobody."""
    blocks = pool.allocate(len(ids) // TOKENS)
    chain = ROOT
    for number, block in enumerate(blocks):
        part = raw(ids[TOKENS * number : TOKENS * (number + 1)])
        chain = pool.enter(block, f"{key}{number}".encode(), part, chain)
    pool.release(blocks)
    return blocks


def test_53_a_block_waits_for_the_step_that_may_touch_it() -> None:
    pool = BlockPool(2, TOKENS)
    blocks = pool.allocate(2)
    step = pool.launch()
    pool.release(blocks)
    assert (pool.available(), pool.coming()) == (0, 2)
    with pytest.raises(PoolError, match="no block"):
        pool.allocate(1)
    pool.complete(step)
    assert sorted(pool.allocate(2)) == sorted(blocks)


def test_53_a_cached_block_is_not_evicted_under_a_running_step() -> None:
    pool = BlockPool(1, TOKENS)
    (block,) = pool.allocate(1)
    pool.enter(block, b"k0", raw([1, 2, 3, 4]), ROOT)
    step = pool.launch()
    pool.release([block])
    assert pool.available() == 0
    with pytest.raises(PoolError, match="before step 1"):
        pool.allocate(1)
    pool.complete(step)


def test_53_a_cached_block_can_be_used_again_at_once() -> None:
    pool = BlockPool(1, TOKENS)
    (block,) = pool.allocate(1)
    pool.enter(block, b"k0", raw([1, 2, 3, 4]), ROOT)
    pool.launch()
    pool.release([block])
    match = pool.match([b"k0"], raw([1, 2, 3, 4]), 1)
    assert match.blocks == [block]
    pool.acquire(match.blocks)
    pool.check([[block]])


def test_53_a_dropped_block_keeps_its_fence() -> None:
    pool = BlockPool(1, TOKENS)
    (block,) = pool.allocate(1)
    pool.enter(block, b"k0", raw([1, 2, 3, 4]), ROOT)
    step = pool.launch()
    pool.release([block])
    assert pool.flush() == 1
    assert pool.available() == 0
    pool.check([])
    pool.complete(step)
    assert pool.available() == 1


def test_55_equal_keys_of_other_ids_do_not_match() -> None:
    pool = BlockPool(4, TOKENS)
    entered(pool, [1, 2, 3, 4])
    match = pool.match([b"k0"], raw([1, 2, 3, 5]), 1)
    assert (match.blocks, match.collided) == ([], True)


def test_55_equal_blocks_behind_other_prefixes_do_not_match() -> None:
    """Block 1 has the same ids and the same key, but was computed behind another block 0."""
    pool = BlockPool(8, TOKENS)
    entered(pool, [1, 1, 1, 1, 5, 5, 5, 5])
    other = pool.allocate(1)
    pool.drop([pool.holds(b"k0")])
    pool.enter(other[0], b"k0", raw([2, 2, 2, 2]), ROOT)
    match = pool.match([b"k0", b"k1"], raw([2, 2, 2, 2, 5, 5, 5, 5]), 2)
    assert match.blocks == other
    pool.check([other])


def test_an_entry_whose_prefix_is_gone_gives_way() -> None:
    pool = BlockPool(8, TOKENS)
    entered(pool, [1, 1, 1, 1, 5, 5, 5, 5])
    pool.drop([pool.holds(b"k0")])
    again = entered(pool, [1, 1, 1, 1, 5, 5, 5, 5])
    assert pool.match([b"k0", b"k1"], raw([1, 1, 1, 1, 5, 5, 5, 5]), 2).blocks == again
    pool.check([])


def test_a_copy_stays_out_of_the_index() -> None:
    pool = BlockPool(8, TOKENS)
    first = entered(pool, [1, 2, 3, 4])
    second = pool.allocate(1)
    assert pool.enter(second[0], b"k0", raw([1, 2, 3, 4]), ROOT) > 0
    assert pool.holds(b"k0") == first[0]
    pool.release(second)
    assert pool.counts().cached == 1


def test_a_chain_ends_where_its_key_belongs_to_others() -> None:
    pool = BlockPool(8, TOKENS)
    entered(pool, [1, 2, 3, 4])
    blocks = pool.allocate(2)
    assert pool.enter(blocks[0], b"k0", raw([9, 9, 9, 9]), ROOT) == BROKEN
    assert pool.enter(blocks[1], b"k1", raw([9, 9, 9, 9]), BROKEN) == BROKEN
    pool.check([blocks])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3, TOKENS)
    ids = [1] * 4 + [2] * 4 + [3] * 4
    blocks = entered(pool, ids)
    for left in (2, 1, 0):
        taken = pool.allocate(1)
        assert pool.match([b"k0", b"k1", b"k2"], raw(ids), 3).blocks == blocks[:left]
        assert pool.was_evicted(f"k{left}".encode())
        assert taken == [blocks[left]]


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(2, TOKENS)
    (old,) = entered(pool, [1] * 4, "a")
    (new,) = entered(pool, [2] * 4, "b")
    pool.acquire([old])
    pool.release([old])
    assert pool.allocate(1) == [new]


@pytest.mark.parametrize("damage", ["free twice", "referenced and free", "no entry", "lost"])
def test_the_checker_sees_damage(damage: str) -> None:
    pool = BlockPool(4, TOKENS)
    entered(pool, [1, 2, 3, 4])
    (block,) = pool.allocate(1)
    pool.check([[block]])
    match damage:
        case "free twice":
            pool._free.append(pool._free[0])
        case "referenced and free":
            pool._free.append(block)
        case "no entry":
            pool._entries[pool.newest()] = None
        case "lost":
            pool._free.pop()
    with pytest.raises(PoolError):
        pool.check([[block]])


def test_the_checker_counts_references() -> None:
    pool = BlockPool(4, TOKENS)
    (block,) = pool.allocate(1)
    for tables in ([], [[block], [block]]):
        with pytest.raises(PoolError, match="references"):
            pool.check(tables)
    pool.release([block])
    with pytest.raises(PoolError, match="more often"):
        pool.release([block])
