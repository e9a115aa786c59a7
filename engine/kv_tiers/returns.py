"""Brings prefixes of waiting requests back from the tiers before admission, a few milliseconds' worth in each step."""

import math
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from sluice.engine.blocks import BlockHash
from sluice.engine.forecast.learning import PrefillPace
from sluice.engine.kv_cache import KvCacheManager
from sluice.engine.kv_tiers.tiers import Extent, KvTiers
from sluice.engine.scheduling.planner import Policy
from sluice.engine.sequence import Sequence
from sluice.engine.types import EngineInfo

Clock = Callable[[], float]

BUSY_COPY_S = 0.004
"""Time that the copies of each direction may take of a step that streams wait for."""
IDLE_COPY_S = 0.025
"""The same where nothing decodes. Whoever comes meanwhile waits for the step."""
COPY_SHARE = 0.1
"""Share of the time of a step's prompt tokens that copies out of the cache may take where that is more: a large model
has large blocks, and the first that is lost ends the prefix."""
MIN_WAIT_S = 0.05
"""A request waits for its prefix at least this long, beyond that as long as it is worth."""
FIRST_WAIT_S = 1.0
"""How long it waits while it is unknown what computing takes, and at least where another engine has its blocks."""
PEER_WORTH = 4.0
"""Blocks of another engine may take this many times as long as computing them here, which the streams that run here
would feel. Both engines copy a few milliseconds' worth a step, and that one answers between two steps."""


class PrefixReturns:
    """Decides which blocks come back, and copies them to free blocks of the KV cache, where admission finds them like
    any other cached prefix. They count as free until then, so what running sequences have reserved is never touched.
    Used by the engine thread alone."""

    def __init__(
        self, tiers: KvTiers, kv: KvCacheManager, policy: Policy, limits: EngineInfo, pace: PrefillPace, clock: Clock
    ) -> None:
        """`pace` has learned what computing takes; `clock` gives seconds."""
        self.tiers = tiers
        self._kv = kv
        self._policy = policy
        self._block_size = limits.block_size
        self._max_num_seqs = limits.max_num_seqs
        self._pace = pace
        self._clock = clock

    def bring_back(self, waiting: Iterable[Sequence], running: Collection[Sequence]) -> None:
        """Go through `waiting`, in order of admission, as far as there is room for them now. A sequence whose blocks do
        not all come back in this step is delayed (`is_returning`). The disk reads ahead for the first one without room.
        """
        self.tiers.finish_transfers()
        if not self._policy.is_in_flight and running:
            return
        spare = self._kv.pool.num_free
        if self._policy.reserves_worst_case:
            spare -= sum(s.worst_case_blocks - s.num_allocated_blocks for s in running)
        num_places = self._max_num_seqs - len(running)
        seconds_left = copy_seconds(running)
        for sequence in islice(waiting, max(num_places, 1)):
            sequence.is_returning = False
            hashes = [] if sequence.needs_prompt_logits else self._kv.shareable_hashes(sequence)
            cached = self._kv.pool.find(hashes)
            needed = self._needed(sequence, cached)
            if needed > spare or not num_places:
                sequence.return_deadline = math.inf
                self.tiers.read_ahead(hashes[len(cached) :], sequence.origin)
                return
            if sequence.may_return and len(cached) < len(hashes):
                seconds_left = self._bring(sequence, hashes, cached, seconds_left)
            if not sequence.is_returning:
                spare -= needed

    def _needed(self, sequence: Sequence, cached: list[int]) -> int:
        """Return how many free blocks the admission of the sequence takes, as the policies count them."""
        reserves = self._policy.reserves_worst_case
        num_blocks = sequence.worst_case_blocks if reserves else sequence.num_next_blocks
        return num_blocks - len(cached) + sum(self._kv.pool.references(block) == 0 for block in cached)

    def _bring(self, sequence: Sequence, hashes: list[BlockHash], cached: list[int], seconds_left: float) -> float:
        """Bring back what there is of the chain `hashes` after its `cached` blocks, or begin to. Returns the seconds
        that are left for copies."""
        missing = hashes[len(cached) :]
        extent = self.tiers.extent(missing, sequence.origin)
        num_found = extent.num_blocks
        if not num_found or not self._is_in_time(sequence, extent):
            return seconds_left
        self.tiers.read_ahead(missing[:num_found], sequence.origin)
        num_ready = self.tiers.num_ready(missing[:num_found])
        if num_ready and seconds_left > 0:
            block_s = self.tiers.read_s + self.tiers.write_s  # another block may have to leave for it
            most = max(int(seconds_left / block_s), 1) if block_s > 0 else num_ready
            num_restored = self._restore(cached, missing[: min(num_ready, most)])
            seconds_left -= num_restored * block_s
        else:
            num_restored = 0
        sequence.is_returning = num_restored < num_found
        return seconds_left

    def _is_in_time(self, sequence: Sequence, extent: Extent) -> bool:
        """Return whether it is worth waiting for blocks; where it is not, the sequence does not ask again."""
        now, token_s = self._clock(), self._pace.prompt_token_s
        compute_s = extent.num_blocks * self._block_size * token_s
        is_from_peer = extent.num_at_peers > 0
        worth_s = PEER_WORTH * compute_s if is_from_peer else compute_s
        if token_s and self.tiers.seconds(extent) > worth_s:
            sequence.may_return = False
            self.tiers.num_slower += 1
        elif sequence.return_deadline == math.inf:
            least_s = FIRST_WAIT_S if is_from_peer or not token_s else MIN_WAIT_S
            sequence.return_deadline = now + max(worth_s, least_s)
        elif now >= sequence.return_deadline:
            sequence.may_return = False
            self.tiers.num_late += 1
        return sequence.may_return

    def _restore(self, cached: list[int], hashes: list[BlockHash]) -> int:
        """Copy blocks that are in memory to free blocks, which then are the last to be reclaimed, with the `cached`
        ones before them. Returns how many were copied."""
        pool = self._kv.pool
        pool.share(cached)
        for block_hash in hashes:  # as a use, so that others make room for what is reclaimed here
            self.tiers.touch(block_hash)
        blocks = pool.allocate(min(len(hashes), pool.num_free))
        try:
            self.tiers.store(pool.take_reclaimed())
            num_ready = min(self.tiers.num_ready(hashes), len(blocks))
            restored = list(zip(blocks, hashes[:num_ready], strict=False))
            if restored:
                self.tiers.restore(restored)
            for block, block_hash in restored:
                pool.index(block, block_hash)
        finally:
            pool.release([*cached, *blocks])
        return len(restored)

    def keep_reclaimed(self, num_prefill: int, *, is_decoding: bool) -> None:
        """Copy the blocks that the plan has reclaimed, before the step writes to them and computes `num_prefill` tokens
        of prompts. Blocks that are computed faster than they come back are not worth it."""
        reclaimed = self._kv.pool.take_reclaimed()
        if not reclaimed:
            return
        token_s = self._pace.prompt_token_s
        if not token_s or self.tiers.seconds(Extent(1)) < self._block_size * token_s:
            self.tiers.store(reclaimed, max(_copy_s(is_decoding), COPY_SHARE * num_prefill * token_s))
        else:
            self.tiers.lose(len(reclaimed))

    def close(self) -> None:
        """End the tiers; those on disk get what only memory has."""
        self.tiers.close(self._kv.pool.cached_blocks())


def copy_seconds(running: Iterable[Sequence]) -> float:
    """Return how long the copies of a step may take, beside what runs."""
    return _copy_s(any(sequence.num_tokens_left == 1 for sequence in running))


def _copy_s(is_decoding: bool) -> float:
    return BUSY_COPY_S if is_decoding else IDLE_COPY_S
