"""The index of a delegated runtime's cache: what it names, and what it does not."""

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.blocks import BlockHash, HashChain
from sluice.engine.delegated.cached_prefixes import GRACE_S, CachedPrefixes, Owner, Told
from sluice.engine.delegated.tensorrt_llm.events import EventReader
from tests.clock import ManualClock
from tests.stand_ins.tensorrt_llm._stand_in.events import CacheEvents
from tests.stand_ins.tensorrt_llm._stand_in.kv_cache import KvCache

SIZE = 4
PLAIN = Owner("", "")
OWNERS = (PLAIN, Owner("tenant", ""), Owner("", "fr"), Owner("tenant", "fr"), None)
"""None is for those of requests that share no blocks: under a salt of their own."""


def chain(token_ids: list[int], owner: Owner) -> list[BlockHash]:
    return HashChain(owner.salt, SIZE, owner.adapter).hashes(token_ids, len(token_ids) // SIZE)


class Asked(NamedTuple):
    """A request of one of three families of prompts."""

    family: int
    num_prompt: int
    num_output: int
    owner: int
    is_last: bool
    """Whether all that are in flight end before the next one comes."""


ASKED = st.builds(
    Asked, st.integers(0, 2), st.integers(1, 18), st.integers(1, 9), st.integers(0, len(OWNERS) - 1), st.booleans()
)


class Traffic:
    """The stand-in's cache, and the index of its events."""

    def __init__(self, num_host_blocks: int) -> None:
        self.cache = KvCache(24, SIZE, reuses=True, events=CacheEvents(4096, 100), num_host_blocks=num_host_blocks)
        self.clock = ManualClock(100.0)
        self.prefixes = CachedPrefixes(SIZE, self.clock)
        self.reader = EventReader(self.prefixes, has_adapters=True)
        self.names: dict[int, BlockHash | None] = {}
        """Our name of each block that the cache has ever had; None for those that have none."""
        self.in_flight: dict[int, tuple[list[int], int]] = {}
        self.read()

    def read(self) -> None:
        self.cache.events.flush()
        for event in self.cache.events.take():
            self.reader.read(json.loads(event))

    def begin(self, number: int, asked: Asked) -> None:
        prompt = [100 * asked.family + place for place in range(asked.num_prompt)]
        token_ids = [*prompt, *range(900, 900 + asked.num_output)]
        owner = OWNERS[asked.owner]
        root = hash(number if owner is None else owner)
        if self.cache.num_free < len(token_ids):
            self.end_all()
        self.prefixes.hand_over(number, prompt, owner)
        self.cache.share(number, self.cache.find(prompt, root))
        self.cache.begin(number, len(token_ids))
        self.cache.store(number, prompt[:-1], root)
        self.in_flight[number] = token_ids, root
        kept = token_ids[:-1]
        names = [None] * len(kept) if owner is None else chain(kept, owner)
        self.names |= dict(zip(self.cache._hashes(kept, root, has_rest=True), [*names, None], strict=False))

    def end_all(self) -> None:
        for number, (token_ids, root) in self.in_flight.items():
            self.cache.store(number, token_ids[:-1], root, is_end=True)
            self.cache.release(number)
            self.prefixes.end(number)
        self.in_flight.clear()

    @property
    def cached(self) -> set[BlockHash]:
        """The blocks in the cache, under our names."""
        return {name for each in self.cache.stored_hashes if (name := self.names[each]) is not None}


@given(st.lists(ASKED, max_size=30), st.sampled_from((0, 3, 20)))
def test_nothing_is_named_that_is_not_there_for_those_who_ask_by_that_name(
    requests: list[Asked], num_host: int
) -> None:
    traffic = Traffic(num_host)
    for number, asked in enumerate(requests):
        traffic.begin(number, asked)
        if asked.is_last:
            traffic.end_all()
        traffic.read()
        assert {*traffic.prefixes.hashes()} <= traffic.cached
        assert len(traffic.prefixes) == len(traffic.cache.stored_hashes)


@given(st.lists(ASKED, max_size=30), st.sampled_from((0, 3, 20)))
def test_of_requests_one_after_the_other_all_is_named(requests: list[Asked], num_host: int) -> None:
    traffic = Traffic(num_host)
    traffic.prefixes.follow(True)
    followed: set[BlockHash] = set()
    for number, asked in enumerate(requests):
        traffic.begin(number, asked)
        traffic.read()
        traffic.end_all()
        traffic.read()
        traffic.clock.now += GRACE_S
        assert {*traffic.prefixes.hashes()} == traffic.cached
        changes = traffic.prefixes.take_changes()
        assert changes is not None
        followed = followed - {*changes[1]} | {*changes[0]}
        assert followed == traffic.cached


class Events:
    """An index, and its events by hand."""

    def __init__(self, *, has_adapters: bool = True) -> None:
        self.clock = ManualClock(100.0)
        self.prefixes = CachedPrefixes(SIZE, self.clock)
        self._reader = EventReader(self.prefixes, has_adapters=has_adapters)

    def stored(self, parent: int | None, *blocks: int, level: int = 0, **told: Any) -> None:
        """Blocks whose names are their first tokens."""
        shapes = [[{"token_id": each + place, "token_extra_id": 0} for place in range(SIZE)] for each in blocks]
        named = zip(blocks, shapes, strict=True)
        own = [{"block_hash": key, "tokens": shape, "cache_level": level, **told} for key, shape in named]
        self.event("stored", parent_hash=parent, blocks=own)

    def event(self, kind: str, window: int = 100, number: int | None = None, **data: Any) -> None:
        event: dict[str, Any] = {"data": {"type": kind, **data}, "window_size": window}
        self._reader.read(event if number is None else {**event, "event_id": number})

    @property
    def hashes(self) -> set[BlockHash]:
        return {*self.prefixes.hashes()}


def tokens(*blocks: int) -> list[int]:
    return [block + place for block in blocks for place in range(SIZE)]


def test_a_block_that_two_owners_may_have_stored_has_no_name_until_it_is_clear_whose_it_is() -> None:
    events = Events()
    for number, owner in enumerate((PLAIN, Owner("tenant", ""))):
        events.prefixes.hand_over(number, tokens(10, 20), owner)
    events.stored(None, 10)
    assert (events.hashes, len(events.prefixes)) == (set(), 1)
    events.prefixes.hand_over(2, tokens(10, 30), PLAIN)
    events.stored(10, 30)
    assert events.hashes == {*chain(tokens(10, 30), PLAIN)}
    other = {"tokens": [{"token_id": each} for each in tokens(10)]}  # the same tokens under another name
    events.event("stored", parent_hash=None, blocks=[{"block_hash": 11, "cache_level": 0, **other}])
    assert events.hashes == {*chain(tokens(10, 30), PLAIN), *chain(tokens(10), Owner("tenant", ""))}
    events.stored(None, 10_000)  # nobody has asked for it
    assert len(events.hashes) == 3


def test_a_block_may_be_the_answer_to_a_shorter_prompt() -> None:
    events = Events()
    events.prefixes.hand_over(0, tokens(10)[:1], Owner("tenant", ""))
    events.prefixes.hand_over(1, tokens(10), PLAIN)
    events.stored(None, 10)
    assert not events.hashes


def test_an_ended_request_counts_as_long_as_its_events_may_be_on_their_way() -> None:
    events = Events()
    events.prefixes.hand_over(0, tokens(10), Owner("tenant", ""))
    events.prefixes.end(0)
    events.prefixes.hand_over(1, tokens(10), PLAIN)
    events.stored(None, 10)
    assert not events.hashes
    events.clock.now += GRACE_S
    events.prefixes.remove([(None, 10)])
    events.stored(None, 10)
    assert events.hashes == {*chain(tokens(10), PLAIN)}


@pytest.mark.parametrize(("salt", "owner"), [("tenant", Owner("tenant", "")), (None, None)])
def test_a_salt_that_is_told_is_believed_and_none_is_not(salt: str | None, owner: Owner | None) -> None:
    events = Events()
    for number, each in enumerate((PLAIN, Owner("tenant", ""))):
        events.prefixes.hand_over(number, tokens(10), each)
    events.stored(None, 10, cache_salt=salt)
    assert events.hashes == (set() if owner is None else {*chain(tokens(10), owner)})


@pytest.mark.parametrize(
    "more", [{"mm_keys": [{"hash": "ab"}]}, {"tokens": [{"token_id": 1, "token_extra_id": 7}] * 4}]
)
def test_blocks_whose_tokens_are_not_all_have_no_name(more: dict[str, Any]) -> None:
    events = Events()
    events.prefixes.hand_over(0, tokens(10, 20), PLAIN)
    events.stored(None, 10, **more)
    events.stored(10, 20)
    assert (events.hashes, len(events.prefixes)) == (set(), 2)


def test_only_what_is_in_the_memory_of_the_gpu_counts() -> None:
    events, names = Events(), chain(tokens(10, 20), PLAIN)
    events.prefixes.hand_over(0, tokens(10, 20, 30), PLAIN)
    events.stored(None, 10, 20)
    events.event("updated", block_hash=20, cache_level={"old_value": 0, "new_value": 1}, priority=None)
    events.stored(20, 30, level=1)
    events.event("updated", block_hash=10, cache_level=None, priority={"old_value": 35, "new_value": 50})
    assert events.hashes >= {names[0]}
    events.event("updated", block_hash=20, cache_level={"old_value": 1, "new_value": 0}, priority=None)
    assert events.hashes == {*names}


def test_where_events_were_dropped_the_index_begins_anew_and_old_names_hold() -> None:
    events, names = Events(), chain(tokens(10, 20, 30), PLAIN)
    events.prefixes.hand_over(0, tokens(10, 20, 30), PLAIN)
    events.event("created", number=0)
    events.stored(None, 10, 20)
    events.event("removed", number=4, block_hashes=[77])
    assert (events.hashes, len(events.prefixes)) == (set(), 0)
    events.prefixes.end(0)
    events.clock.now += GRACE_S
    events.stored(20, 30)  # so those before it are there too
    assert events.hashes == {*names}


def test_of_several_windows_the_longest_counts() -> None:
    events = Events(has_adapters=False)
    events.prefixes.hand_over(0, tokens(10, 20), PLAIN)
    for window in (50, 100):
        events.event("created", window, num_blocks_per_cache_level=[8, 0])
    events.stored(None, 10)
    events.event("removed", 50, block_hashes=[10])
    events.event("what comes later")
    events.event("stored", 50, parent_hash=None, blocks=[])
    assert len(events.hashes) == 1


def test_ranks_have_caches_of_their_own_of_which_only_the_size_is_known() -> None:
    prefixes = CachedPrefixes(SIZE)
    reader = EventReader(prefixes, has_adapters=False)
    prefixes.hand_over(0, tokens(10), PLAIN)
    block = {"block_hash": 1, "tokens": [{"token_id": each} for each in tokens(10)], "cache_level": 0}
    for rank in (0, 1):
        stored = {"type": "stored", "parent_hash": None, "blocks": [block]}
        reader.read({"event_id": 5, "attention_dp_rank": rank, "window_size": 9, "data": stored})
    assert (prefixes.hashes(), len(prefixes)) == ([], 2)


def test_names_that_were_forgotten_are_learnt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.engine.delegated.cached_prefixes.MAX_REMEMBERED", 0)
    prefixes = CachedPrefixes(SIZE)
    for _ in range(2):
        prefixes.store(None, [(1, tokens(10)), (2, tokens(20))], Told("", ""))
        assert prefixes.hashes() == chain(tokens(10, 20), PLAIN)
        prefixes.remove([2, 1, 9])
        assert (prefixes.hashes(), prefixes._named, prefixes._blocks) == ([], {}, {})
    prefixes.store(7, [(8, tokens(10))], Told(None, None))  # behind a parent that nobody knows
    assert (prefixes.hashes(), len(prefixes)) == ([], 1)


def test_blocks_of_before_a_sleep_are_forgotten_and_salts_are_told_behind_a_new_prefix() -> None:
    prefixes = CachedPrefixes(SIZE)
    prefixes.follow(True)
    prefixes.store(None, [("old", tokens(10))], Told("", ""))
    assert prefixes.hashes() == chain(tokens(10), PLAIN)
    prefixes.clear("slept")
    assert (prefixes.hashes(), len(prefixes)) == ([], 0)
    prefixes.store("old", [("behind", tokens(20))], Told(None, None))
    prefixes.store(None, [("late", tokens(30))], Told("tenant", ""))  # told before the sleep
    prefixes.store(None, [("new", tokens(10))], Told("slept", ""))
    prefixes.remove(["old"])
    assert prefixes.hashes() == chain(tokens(10), PLAIN)


def test_an_adapter_that_comes_again_under_a_name_has_blocks_of_its_own() -> None:
    prefixes = CachedPrefixes(SIZE)
    for number, digest in enumerate(("first", "second")):
        prefixes.hand_over(number, tokens(10), Owner("", "fr", digest))
        prefixes.store(None, [(number, tokens(10))], Told(None, None))
        prefixes.end(number)
    assert prefixes.hashes() == [HashChain("", SIZE, each).hashes(tokens(10), 1)[0] for each in ("first", "second")]
