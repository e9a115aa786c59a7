"""The picture of an engine's KV cache: the state and the owner of each block."""

from pytest import MonkeyPatch

from sluice.engine.blocks import BlockHash
from sluice.engine.frames import OTHER_HOLDER, RESERVED, BlockMap, BlockOwner
from sluice.engine.kv_cache import BlockState, KvCacheManager
from sluice.engine.loop import recorder
from sluice.engine.loop.recorder import MAX_ID_CHARS, draw_block_map
from sluice.engine.sequence import Sequence
from sluice.engine.types import EngineInfo, GenerateRequest, SamplingParams

MAX_TOKENS = 6


class Cache:
    """A cache of blocks of one token, and the sequences in it."""

    def __init__(self, num_blocks: int) -> None:
        self.info = EngineInfo(
            runtime="openvino",
            model_type="",
            dtype="",
            vocab_size=8,
            eos_token_ids=(),
            max_model_len=num_blocks,
            block_size=1,
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            load_seconds=0.0,
        )
        self.kv = KvCacheManager(self.info, is_prefix_caching=True)
        self.running: list[Sequence] = []

    def add(self, request_id: str, num_blocks: int, shared: tuple[int, ...] = ()) -> list[int]:
        """Add a sequence that holds blocks of its own and `shared` ones of others. Returns its own."""
        params = SamplingParams(max_tokens=MAX_TOKENS)
        request = GenerateRequest(request_id=request_id, prompt_token_ids=[1], sampling=params)
        sequence = Sequence(len(self.running), request, self.info, 0.0)
        sequence.table_row = self.kv.tables.open()
        self.kv.pool.share(shared)
        blocks = self.kv.pool.allocate(num_blocks)
        self.kv.tables.append(sequence.table_row, [*shared, *blocks])
        sequence.num_allocated_blocks = len(shared) + num_blocks
        self.running.append(sequence)
        return blocks

    def draw(self, max_cells: int = 4096) -> BlockMap:
        missing = sum(each.worst_case_blocks - each.num_allocated_blocks for each in self.running)
        return draw_block_map(self.kv, self.running, self.kv.pool.num_used + missing, max_cells)


def test_each_block_has_its_state_and_its_owner() -> None:
    cache = Cache(16)
    assert set(cache.draw().cells) == {BlockState.FREE} and set(cache.draw().owners) == {0}
    [cached] = cache.kv.pool.allocate(1)
    cache.kv.pool.index(cached, BlockHash(b"1" * 16))
    cache.kv.pool.release([cached])
    owned, shared = cache.add("a", 2)
    [second] = cache.add("b", 1, (shared,))
    drawn = cache.draw()
    assert drawn.blocks_per_cell == 1 and drawn.num_shared == 1
    states = dict(enumerate(drawn.cells))
    assert states.pop(cached) == BlockState.CACHED and states.pop(shared) == BlockState.SHARED
    assert states.pop(owned) == states.pop(second) == BlockState.OWNED
    assert set(states.values()) == {BlockState.FREE} and len(states) == 12
    assert drawn.holders == [BlockOwner("a", 2, MAX_TOKENS), BlockOwner("b", 2, MAX_TOKENS)]
    assert (drawn.owners[owned], drawn.owners[second]) == (1, 2)
    assert drawn.owners[shared] in (1, 2), "one of those that share it"


def test_reserved_blocks_are_those_that_come_next() -> None:
    cache = Cache(9)
    blocks = cache.kv.pool.allocate(6)
    for number, block in enumerate(blocks):
        cache.kv.pool.index(block, BlockHash(bytes([number]) * 16))
    cache.kv.pool.release(blocks)
    cache.add("a", 1)
    drawn = cache.draw()
    reserved = {block for block, owner in enumerate(drawn.owners) if owner == RESERVED}
    assert len(reserved) == MAX_TOKENS - 1
    next_ones = cache.kv.pool.allocate(MAX_TOKENS - 1)
    assert reserved == set(next_ones), "free ones first, then the cached ones that were used least recently"
    assert {drawn.cells[block] for block in reserved} == {BlockState.FREE, BlockState.CACHED}


def test_sequences_with_few_blocks_are_not_named(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_HOLDERS", 1)
    cache = Cache(24)
    [few] = cache.add("few", 1)
    many = cache.add("x" * (MAX_ID_CHARS + 1), 3)
    drawn = cache.draw()
    assert drawn.holders == [BlockOwner("x" * MAX_ID_CHARS, 3, MAX_TOKENS)]
    assert drawn.owners[few] == OTHER_HOLDER and {drawn.owners[block] for block in many} == {1}


def test_a_cell_of_several_blocks_shows_what_is_in_them() -> None:
    cache = Cache(7)
    [first] = cache.add("a", 1)  # blocks are handed out from the first on
    drawn = cache.draw(max_cells=3)
    assert first == 0 and drawn.blocks_per_cell == 3
    assert list(drawn.cells) == [BlockState.OWNED, BlockState.FREE, BlockState.FREE], "one of three is held"
    assert list(drawn.owners) == [1, RESERVED, 0], "the last cell has one block, which nobody has reserved"
    [shared] = cache.add("b", 1)
    cache.add("c", 0, (shared,))
    assert list(cache.draw(max_cells=3).cells) == [3, 0, 0], "of two as frequent states the higher one"
    cache.add("d", 1)
    drawn = cache.draw(max_cells=3)
    assert list(drawn.cells) == [2, 0, 0], "two are owned, one is shared"
    assert drawn.holders[drawn.owners[0] - 1].request_id == "a", "the first owned block of the cell"


def test_cached_blocks_hide_no_sequence_of_their_cell() -> None:
    cache = Cache(8)
    blocks = cache.kv.pool.allocate(3)
    for number, block in enumerate(blocks):
        cache.kv.pool.index(block, BlockHash(bytes([number]) * 16))
    cache.kv.pool.release(blocks[:2])
    cache.kv.tables.append(cache.kv.tables.open(), blocks[2:])
    assert list(cache.draw(max_cells=2).cells) == [BlockState.OWNED, BlockState.FREE]
