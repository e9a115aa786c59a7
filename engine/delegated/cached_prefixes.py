"""The index of the prefixes that a runtime has in its cache, under the names that gateways give their blocks.

A runtime names blocks by hashes of its own, and many do not tell under which cache salt and adapter a block was stored.
Whose it is follows from the requests that were handed over: a chain of blocks belongs to a request whose tokens it has.
Where requests of several owners have them, the chain has no name, and nobody hears of it.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import eq
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from sluice.engine.blocks import BlockHash, chain_root, next_hash

if TYPE_CHECKING:
    from sluice.engine.process.kv_events import KvEventPublisher

GRACE_S = 30.0
"""How long after its end a request may still be the one that stored a block. Events come within a second."""
MAX_REMEMBERED = 1 << 17
"""Most blocks that have left the cache whose names are remembered; a few bytes more than their tokens each."""
MAX_CHANGES = 1 << 16
"""Most changes that are kept for who follows the index."""


class Owner(NamedTuple):
    """The requests that can reuse a block: those with this cache salt and this adapter."""

    salt: str
    adapter: str
    digest: str = ""
    """The adapter's, where it has one (`EngineInfo.adapter_digests`): another may come under the same name."""

    @property
    def root(self) -> BlockHash:
        """The hash that the names of its blocks begin with."""
        return chain_root(self.salt, self.digest or self.adapter)


class Told(NamedTuple):
    """The owner of a prompt's first block, as far as an event tells it; None for what it does not."""

    salt: str | None
    adapter: str | None


@dataclass(slots=True, eq=False)
class _Block:
    key: Hashable
    """The runtime's name."""
    parent: "_Block | None"
    token_ids: "array[int] | None"
    """None for a block that cannot have a name, nor those that follow it."""
    told: Told
    is_cached: bool = False
    is_lost: bool = False
    """Whether it was in the cache when events were missed, and nothing was told of it since."""
    hash: BlockHash | None = None
    owner: Owner | None = None


class _Handed(NamedTuple):
    """A request that was handed over."""

    prompt: list[int]
    owner: Owner | None
    """None for one whose blocks its tokens do not name: those of images, or under a salt that is nobody's."""

    def may_have_stored(self, token_ids: list[int]) -> bool:
        """Return whether these are the beginning of its prompt, or of prompt and answer. Most prompts differ soon, and
        there may be thousands: none is copied."""
        return all(map(eq, token_ids, self.prompt))


class CachedPrefixes:
    """Implements `sluice.engine.process.prefix_feed.FollowedIndex` over a runtime's events. Used on the event loop
    alone."""

    def __init__(self, block_size: int, clock: Callable[[], float] = perf_counter) -> None:
        self._block_size = block_size
        self._clock = clock
        self._blocks: dict[Hashable, _Block] = {}
        """Blocks in the cache and blocks that are remembered, by the runtime's name."""
        self._gone: OrderedDict[Hashable, None] = OrderedDict()
        """Names of the blocks that are remembered, the first to be forgotten first."""
        self._named: dict[BlockHash, _Block] = {}
        self._in_flight: dict[int, _Handed] = {}
        self._ended: deque[tuple[float, _Handed]] = deque()
        """Requests that have ended lately, and until when they count."""
        self._changes: dict[BlockHash, bool] | None = None
        self._salt_prefix = ""
        self.observer: KvEventPublisher | None = None
        """Publishes what enters and leaves the index, with the tokens."""

    def __len__(self) -> int:
        """Return how many blocks are in the cache, with a name or without."""
        return len(self._blocks) - len(self._gone)

    # -- requests

    def hand_over(self, number: int, prompt: list[int], owner: Owner | None) -> None:
        """The runtime gets a request. `owner` is None for one whose blocks its tokens do not name."""
        self._in_flight[number] = _Handed(prompt, owner)

    def end(self, number: int) -> None:
        """The runtime has ended a request."""
        handed = self._in_flight.pop(number, None)
        if handed is not None:
            self._ended.append((self._clock() + GRACE_S, handed))
        self._forget_ended()

    def _forget_ended(self) -> None:
        now = self._clock()
        while self._ended and self._ended[0][0] <= now:
            self._ended.popleft()

    # -- events

    def store(
        self, parent: Hashable | None, blocks: Iterable[tuple[Hashable, Sequence[int] | None]], told: Told
    ) -> None:
        """Blocks that follow one another are in the cache: the runtime's names and their tokens, which are None where
        the tokens alone do not make the content. A parent that is not known leaves them without names."""
        before, is_first = None if parent is None else self._blocks.get(parent), parent is None
        if told.salt is not None:
            if not told.salt.startswith(self._salt_prefix):
                return  # stored before the prefix came: no request finds it
            told = told._replace(salt=told.salt.removeprefix(self._salt_prefix))
        last = None
        for key, token_ids in blocks:
            block = self._blocks.get(key)
            if block is None or block.token_ids is None:
                has_way = is_first or (before is not None and before.token_ids is not None)
                block = self._add(key, before, token_ids if has_way else None, told)
            if block.token_ids is not None:
                last = block
            if not block.is_cached:
                self._enter(block)
            above = block.parent
            while above is not None and above.is_lost:  # none is stored without those before it
                self._enter(above)
                above = above.parent
            before, is_first = self._blocks[key], False
        if last is not None:
            self._name(last)

    def move_in(self, key: Hashable) -> None:
        """A block is back in the cache from another memory."""
        block = self._blocks.get(key)
        if block is not None and not block.is_cached:
            self._enter(block)

    def remove(self, keys: Iterable[Hashable]) -> None:
        """Blocks have left the cache."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block.is_lost = False
            if block is not None and block.is_cached:
                self._leave(block)
        while len(self._gone) > MAX_REMEMBERED:
            key, _ = self._gone.popitem(last=False)
            forgotten = self._blocks.pop(key)
            if forgotten.hash is not None and self._named.get(forgotten.hash) is forgotten:
                del self._named[forgotten.hash]

    def begin_anew(self) -> None:
        """Events are missing: nothing is known to be there until it is told. Names stay what they are."""
        lost = [block for block in self._blocks.values() if block.is_cached]
        self.remove([block.key for block in lost])
        for block in lost:
            block.is_lost = True

    def clear(self, salt_prefix: str) -> None:
        """No request will find a block that was stored so far: from now on the runtime gets all salts behind
        `salt_prefix`."""
        self.begin_anew()
        for state in (self._blocks, self._gone, self._named, self._ended):
            state.clear()
        self._salt_prefix = salt_prefix

    def _add(self, key: Hashable, parent: _Block | None, token_ids: Sequence[int] | None, told: Told) -> _Block:
        is_whole = token_ids is not None and len(token_ids) == self._block_size
        made = _Block(key, parent, array("i", token_ids) if token_ids is not None and is_whole else None, told)
        if (old := self._blocks.get(key)) is not None:
            made.is_cached = old.is_cached
        self._blocks[key] = made
        return made

    def _enter(self, block: _Block) -> None:
        block.is_cached, block.is_lost = True, False
        if self._blocks.setdefault(block.key, block) is not block:  # it was forgotten, and is known anew
            return
        self._gone.pop(block.key, None)
        if block.hash is not None:
            self._announce(block, block.hash)

    def _leave(self, block: _Block) -> None:
        block.is_cached = False
        self._gone[block.key] = None
        if block.hash is not None:
            self._note(block.hash, False)
            if self.observer is not None:
                self.observer.on_removed(block.hash)

    # -- names

    def _name(self, block: _Block | None) -> None:
        """Give a block and those before it their names, if it can be told whose they are."""
        nameless: list[_Block] = []
        while block is not None and block.hash is None:
            if block.token_ids is None:
                return
            nameless.append(block)
            block = block.parent
        if not nameless:
            return
        nameless.reverse()
        owner = block.owner if block is not None else self._find_owner(nameless)
        if owner is None:
            return
        parent = block.hash if block is not None else None
        for each in nameless:
            assert each.token_ids is not None
            each.hash = parent = next_hash(parent or owner.root, each.token_ids)
            each.owner = owner
            self._named[each.hash] = each
            if each.is_cached:
                self._announce(each, each.hash)

    def _find_owner(self, blocks: list[_Block]) -> Owner | None:
        """Return the only owner whose requests can have stored these blocks, a prompt's first and those that follow it;
        None where it may be another's."""
        salt, adapter = blocks[0].told
        if salt is not None and adapter is not None:
            return Owner(salt, adapter)
        self._forget_ended()
        handed = chain(self._in_flight.values(), (each for _, each in self._ended))
        token_ids = [token_id for block in blocks for token_id in block.token_ids or ()]
        owners = {each.owner for each in handed if each.may_have_stored(token_ids)}
        owners = {each for each in owners if each is None or self._may_have(each, blocks[0])}
        return owners.pop() if len(owners) == 1 else None

    def _may_have(self, owner: Owner, first: _Block) -> bool:
        """Return whether an owner can be that of a block without a name. The runtime has one name for each block of an
        owner: where that is known, this block is another's."""
        assert first.token_ids is not None
        salt, adapter = first.told
        if salt not in (None, owner.salt) or adapter not in (None, owner.adapter):
            return False
        return next_hash(owner.root, first.token_ids) not in self._named

    # -- who follows

    def hashes(self) -> list[BlockHash]:
        return [block.hash for block in self._blocks.values() if block.is_cached and block.hash is not None]

    def follow(self, is_followed: bool) -> None:
        self._changes = {} if is_followed else None

    def take_changes(self) -> tuple[list[BlockHash], list[BlockHash]] | None:
        changes, self._changes = self._changes, {}
        if changes is None or len(changes) > MAX_CHANGES:
            return None
        stored = [block_hash for block_hash, is_stored in changes.items() if is_stored]
        return stored, [block_hash for block_hash, is_stored in changes.items() if not is_stored]

    def _announce(self, block: _Block, block_hash: BlockHash) -> None:
        self._note(block_hash, True)
        if self.observer is not None:
            assert block.owner is not None and block.token_ids is not None
            parent = None if block.parent is None else block.parent.hash
            self.observer.on_block_stored(
                block_hash, parent, block.token_ids.tolist(), block.owner.salt, block.owner.adapter
            )

    def _note(self, block_hash: BlockHash, is_stored: bool) -> None:
        if self._changes is not None and len(self._changes) <= MAX_CHANGES:
            self._changes[block_hash] = is_stored
