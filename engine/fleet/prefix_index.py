"""Which replica has which blocks of prompts, as far as a gateway knows. Used by one thread; the clock is passed in.

Replicas are numbers from 0 on, and each has a bit. The index has a mask for each block hash, so that one look-up
answers for all replicas.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HASH_BYTES = 16
"""Bytes of a block's hash (`sluice.engine.blocks.BlockHash`)."""
MAX_BLOCKS = 1 << 19
"""Default of the most blocks that an index has: about 100 MB."""
EXPECTED_S = 30.0
"""Default of the seconds after which a prompt that was sent somewhere must have its blocks there."""
MAX_GALLOPS = 8
"""Most changes along a prompt that are searched for one by one; with more, looking at each block takes less time."""
SWEEP_BLOCKS = 4096
"""Most blocks that one change looks at, to remove bits of forgotten replicas."""


@dataclass(slots=True)
class _Part:
    """One replica's part of the index."""

    bit: int
    number: int | None
    """The last change that was applied; None until one that begins anew."""


class PrefixIndex:
    """Knows the leading blocks that each replica has of a prompt.

    A replica drops the end of a prefix before its beginning, so the search takes a block for a sign of those before it.
    Where the index itself has forgotten blocks, it looks at each of them.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, expected_s: float = EXPECTED_S) -> None:
        """`max_blocks` bounds the blocks in the index; beyond it those go that no change and no request has named for
        the longest time. Blocks of a sent prompt are dropped after `expected_s` seconds unless the replica reports
        them."""
        self._max_blocks = max_blocks
        self._expected_s = expected_s
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        """The replicas that have a block, by its hash; the least recently used first."""
        self._parts: dict[int, _Part] = {}
        self._num_replicas = 0
        """One more than the highest number of a replica so far."""
        self._replicas: dict[int, int] = {}
        """Replica by the position of its bit."""
        self._live = 0
        """The bits in use. Masks may have others, of forgotten replicas, until a sweep has removed them."""
        self._next_bit = 0
        self._free_bits: list[int] = []
        self._retired: list[int] = []
        """Positions of bits that were given up and that the sweep under way does not remove."""
        self._sweep: _Sweep | None = None
        self._expected: dict[int, dict[bytes, float]] = {}
        """For each replica the expected blocks, and until when."""
        self._expectations: deque[tuple[float, int, list[bytes]]] = deque()
        self._num_expectations = 0
        self.num_forgotten = 0
        """Blocks that were dropped because there were more than `max_blocks`, since the start."""

    def __len__(self) -> int:
        """Return how many blocks are in the index."""
        return len(self._masks)

    # -- what replicas report

    def apply(self, replica: int, number: int, stored: bytes, removed: bytes, is_first: bool) -> bool:
        """Apply a replica's report of the blocks that it has stored and removed: hashes of 16 bytes, one after the
        other. `number` counts its reports up by one, and the report that `is_first` has all its blocks.

        Returns False where reports before this one are missing: the replica's part is forgotten, and its reports are
        ignored up to the next that `is_first`. Raises ValueError where the bytes are no whole hashes.
        """
        for name, hashes in (("stored", stored), ("removed", removed)):
            if len(hashes) % HASH_BYTES:
                raise ValueError(f"{name} has {len(hashes)} bytes; expected hashes of {HASH_BYTES} bytes each")
        self._continue_sweep()
        part = self._parts.get(replica)
        if is_first:
            self._give_up(replica)
            part = self._parts[replica] = self._new_part(replica)
        elif part is None or part.number is None:
            return False
        elif number != part.number + 1:
            self.forget(replica)
            return False
        part.number = number
        self._remove(part.bit, _split(removed))
        self._store(replica, part.bit, _split(stored))
        return True

    def forget(self, replica: int) -> None:
        """Forget all that the replica has, or is expected to have soon. It takes the same time for any number."""
        self._give_up(replica)
        self._parts.pop(replica, None)

    def _store(self, replica: int, bit: int, hashes: Iterator[bytes]) -> None:
        masks, expected = self._masks, self._expected.get(replica)
        for block in hashes:
            masks[block] = masks.get(block, 0) | bit
            if expected:
                expected.pop(block, None)
        self._shrink()

    def _remove(self, bit: int, hashes: Iterator[bytes]) -> None:
        for block in hashes:
            self._clear(block, bit)

    def _clear(self, block: bytes, bit: int) -> None:
        mask = self._masks.get(block, 0) & ~bit
        if mask & self._live:
            self._masks[block] = mask
        else:
            self._masks.pop(block, None)

    # -- what was sent

    def expect(self, replica: int, hashes: Sequence[bytes], now: float) -> None:
        """Expect the blocks `hashes` of a prompt, from its first on, on the replica: it was sent there at `now`
        (seconds). They count at once, and for good once the replica reports them. This also marks them as used."""
        self._continue_sweep()
        self._expire(now)
        part = self._parts.get(replica)
        if part is None:
            part = self._parts[replica] = self._new_part(replica)
        bit, masks, pending = part.bit, self._masks, self._expected.setdefault(replica, {})
        until, fresh = now + self._expected_s, []
        for block in reversed(hashes):  # so that the end is forgotten before the beginning
            mask = masks.get(block, 0)
            if not mask & bit or block in pending:
                pending[block] = until
                fresh.append(block)
            masks[block] = mask | bit
            masks.move_to_end(block)
        if fresh:
            self._expectations.append((until, replica, fresh))
            self._num_expectations += len(fresh)
        while self._num_expectations > self._max_blocks:
            self._expire_first()
        self._shrink()

    def _expire(self, now: float) -> None:
        while self._expectations and self._expectations[0][0] <= now:
            self._expire_first()

    def _expire_first(self) -> None:
        until, replica, blocks = self._expectations.popleft()
        self._num_expectations -= len(blocks)
        pending, part = self._expected.get(replica), self._parts.get(replica)
        if pending is None or part is None:
            return
        for block in blocks:
            if pending.get(block) == until:
                del pending[block]
                self._clear(block, part.bit)

    # -- look-up

    def leading_blocks(self, hashes: Sequence[bytes]) -> list[int]:
        """Return how many of the first of `hashes` each replica has, by its number; replicas beyond the end of the list
        have none."""
        counts = [0] * self._num_replicas
        alive, position, end = self._live, 0, len(hashes)
        num_gallops = 0 if self.num_forgotten else MAX_GALLOPS  # a block may be there without those before it
        while alive and position < end and num_gallops:
            num_gallops -= 1
            until = self._next_change(hashes, position, alive)
            left = self._masks.get(hashes[until], 0) & alive if until < end else 0
            self._set_counts(counts, alive ^ left, until)
            alive, position = left, until + 1
        if alive and position < end:
            get = self._masks.get
            for place in range(position, end):
                left = get(hashes[place], 0) & alive
                if left != alive:
                    self._set_counts(counts, alive ^ left, place)
                    alive = left
                    if not alive:
                        break
        self._set_counts(counts, alive, end)
        return counts

    def _set_counts(self, counts: list[int], mask: int, count: int) -> None:
        """Set the counts of the replicas in `mask`."""
        replicas = self._replicas
        while mask:
            bit = mask & -mask
            counts[replicas[bit.bit_length() - 1]] = count
            mask ^= bit

    def _next_change(self, hashes: Sequence[bytes], start: int, alive: int) -> int:
        """Return the first position from `start` on whose block not all of `alive` have, or else the length."""
        get, end = self._masks.get, len(hashes)
        if get(hashes[start], 0) & alive != alive:
            return start
        if get(hashes[-1], 0) & alive == alive:
            return end
        low, step = start, 1  # all of `alive` have `low`
        while low + step < end - 1 and get(hashes[low + step], 0) & alive == alive:
            low, step = low + step, 2 * step
        high = min(low + step, end - 1)  # and not all of them `high`
        while high - low > 1:
            middle = (low + high) // 2
            if get(hashes[middle], 0) & alive == alive:
                low = middle
            else:
                high = middle
        return high

    # -- bits

    def _new_part(self, replica: int) -> _Part:
        if self._free_bits:
            position = self._free_bits.pop()
        else:
            position, self._next_bit = self._next_bit, self._next_bit + 1
        self._replicas[position] = replica
        self._num_replicas = max(self._num_replicas, replica + 1)
        self._live |= 1 << position
        return _Part(1 << position, None)

    def _give_up(self, replica: int) -> None:
        """Take the bit of the replica's part out of use, and drop what is expected of it."""
        self._expected.pop(replica, None)
        part = self._parts.get(replica)
        if part is not None:
            self._live &= ~part.bit
            self._retired.append(part.bit.bit_length() - 1)

    def _continue_sweep(self) -> None:
        """Remove some of the bits that are out of use, so that they can be used again."""
        if self._sweep is None:
            if not self._retired:
                return
            self._sweep, self._retired = _Sweep(list(self._masks), self._retired), []
        sweep = self._sweep
        kept = ~sum(1 << position for position in sweep.positions)
        for block in sweep.blocks[-SWEEP_BLOCKS:]:
            mask = self._masks.get(block)
            if mask is not None:
                if mask & kept & self._live:
                    self._masks[block] = mask & kept
                else:
                    del self._masks[block]
        del sweep.blocks[-SWEEP_BLOCKS:]
        if not sweep.blocks:
            self._free_bits += sweep.positions
            for position in sweep.positions:
                del self._replicas[position]
            self._sweep = None

    def _shrink(self) -> None:
        while len(self._masks) > self._max_blocks:
            _, mask = self._masks.popitem(last=False)
            self.num_forgotten += bool(mask & self._live)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The removal of bits from all masks, some at a time."""

    blocks: list[bytes]
    """Hashes still to look at. Blocks that came later have none of the bits."""
    positions: list[int]


def _split(hashes: bytes) -> Iterator[bytes]:
    return (hashes[begin : begin + HASH_BYTES] for begin in range(0, len(hashes), HASH_BYTES))
