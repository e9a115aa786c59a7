"""The tiers of one engine: what the KV cache gives up goes to host memory, what falls out there to the disk, and both
come back by hash. So do blocks that other engines have computed, by way of host memory."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

from sluice.engine.blocks import BlockHash, PromptOrigin
from sluice.engine.config import EngineConfig
from sluice.engine.kv_tiers.disk import DiskTier
from sluice.engine.kv_tiers.host import HostTier
from sluice.engine.kv_tiers.identity import block_identity
from sluice.engine.kv_tiers.peers import PeerBlocks
from sluice.engine.runners.base import Runner
from sluice.engine.statistics import KvTierStats
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.machine import available_bytes

log = logging.getLogger(__name__)

TRANSIT_BYTES = 64 << 20
"""Memory beside the host tier for blocks on their way to and from the disk."""
MIN_TRANSIT, MAX_TRANSIT = 4, 256
"""Bounds of how many blocks that is."""
CLOSE_S = 2.0
"""Longest time at the end for writing blocks to the disk that only memory has."""
POLL_S = 0.001
RATE = 1.0 / 8
"""Weight of the latest copies in the running means of their times."""

CachedBlock = tuple[int, BlockHash]
"""A block of the KV cache, and the hash of its content."""


class Extent(NamedTuple):
    """How many blocks at the beginning of a chain can come back; how many of them the disk alone has, and how many
    another engine."""

    num_blocks: int
    num_on_disk: int = 0
    num_at_peers: int = 0


class KvTiers:
    """Keeps blocks outside of the KV cache. Used by the engine thread alone, between two steps of its runner.

    A block that has come back stays in its tier: when the cache gives it up again, nothing needs to be copied.
    """

    def __init__(
        self,
        runner: Runner,
        host: HostTier,
        disk: DiskTier | None,
        peers: PeerBlocks | None = None,
        *,
        is_transit: bool = False,
    ) -> None:
        """With `is_transit` the host tier has room for blocks of `peers` on their way, and keeps none."""
        self._runner = runner
        self._host = host
        self._disk = disk
        self._peers = peers
        self._is_transit = is_transit
        self._max_transfers = MIN_TRANSIT if disk is None else _num_in_transit(runner.block_bytes) // 2
        """Most blocks that are read, and most that are written, at a time."""
        self._num_stored = self._num_lost = self._num_disk_stored = self._num_disk_lost = 0
        self._num_hits = self._num_disk_hits = self._num_damaged = 0
        self._restore_s = 0.0
        self._from_disk: set[BlockHash] = set()
        """Blocks that were read from the disk and not yet copied to the cache."""
        self._from_peers: set[BlockHash] = set()
        """The same of blocks that other engines have sent."""
        self.num_slower = self.num_late = 0
        """Requests whose prefix was not brought back, as computing it was faster; whose prefix took too long."""
        self.read_s, self.write_s = self._measure()
        """Seconds that it takes to copy a block from the cache and to it."""

    def _measure(self) -> tuple[float, float]:
        """Copy block 0, which holds nothing yet, out and back."""
        row = self._host.take()
        blocks, contents = [0], [self._host.content(row)]
        read_s, write_s = [], []
        for _ in range(3):
            started = perf_counter()
            self._runner.read_blocks(blocks, contents)
            middle = perf_counter()
            self._runner.write_blocks(blocks, contents)
            read_s.append(middle - started)
            write_s.append(perf_counter() - middle)
        self._host.give_back(row)
        return min(read_s), min(write_s)

    # -- from the cache

    def store(self, blocks: Sequence[CachedBlock], max_seconds: float = math.inf) -> None:
        """Copy blocks that the cache gives up, in the order in which it does, as far as time allows. The last ones go
        first: they begin the prefixes whose ends come before them."""
        missing = []
        for block, block_hash in reversed(blocks):
            if block_hash in self._host:
                self._host.touch(block_hash)
            else:
                missing.append((block, block_hash))
        is_short = self.read_s * len(missing) > max_seconds
        num_copied = max(int(max_seconds / self.read_s), 1) if is_short else len(missing)
        self._num_lost += len(missing) - num_copied
        kept = missing[:num_copied]
        if not kept:
            return
        started = perf_counter()
        # The first of a prefix is kept last, so that it is the last to go.
        for block, block_hash in reversed(kept):
            self._make_room()
            row = self._host.take()
            self._runner.read_blocks([block], [self._host.content(row)])
            self._host.keep(block_hash, row)
        self._num_stored += len(kept)
        self.read_s += RATE * ((perf_counter() - started) / len(kept) - self.read_s)

    def lose(self, num_blocks: int) -> None:
        """Count blocks that the cache gives up and that are not copied."""
        self._num_lost += num_blocks

    def touch(self, block_hash: BlockHash) -> None:
        """Count a use of a block in memory."""
        self._host.touch(block_hash)

    def _make_room(self) -> None:
        """Move the least recently used blocks from the host tier to the disk, or out, until there is room for one."""
        while self._host.is_full:
            oldest, disk = self._host.oldest(), self._disk
            self._from_disk.discard(oldest)
            self._from_peers.discard(oldest)
            if disk is None or disk.is_off or disk.holds(oldest):
                self._host.drop(oldest)
            elif disk.num_writing < self._max_transfers and disk.has_room:
                row = self._host.send(oldest)
                disk.write(oldest, row, self._host.content(row))
            else:
                self._host.drop(oldest)
                self._num_disk_lost += 1

    # -- to the cache

    def extent(self, hashes: Sequence[BlockHash], origin: PromptOrigin | None = None) -> Extent:
        """Return how many blocks at the beginning of the chain `hashes` are in memory, on the disk or at `origin`."""
        num_found = num_on_disk = num_at_peers = 0
        for block_hash in hashes:
            if block_hash not in self._host:
                if self._disk is not None and block_hash in self._disk:
                    num_on_disk += 1
                elif self._peers is not None and self._peers.has(origin, block_hash):
                    num_at_peers += 1
                else:
                    break
            num_found += 1
        return Extent(num_found, num_on_disk, num_at_peers)

    def num_ready(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many blocks at the beginning of the chain are in memory."""
        return next((index for index, each in enumerate(hashes) if each not in self._host), len(hashes))

    def read_ahead(self, hashes: Sequence[BlockHash], origin: PromptOrigin | None = None) -> None:
        """Begin to read those of `hashes` that the disk alone has, or `origin`, as many as may be under way."""
        self._read_disk(hashes)
        if self._peers is not None and origin is not None:
            self._fetch(self._peers, hashes, origin)

    def _read_disk(self, hashes: Sequence[BlockHash]) -> None:
        disk = self._disk
        if disk is None or disk.is_off:
            return
        # No more than the host tier can keep beside each other, else the first would go before it is used.
        for block_hash in hashes[: min(self._max_transfers, self._host.num_blocks)]:
            if disk.num_reading >= self._max_transfers:
                return
            if block_hash not in self._host and block_hash in disk and not disk.is_reading(block_hash):
                row = self._host.take()
                disk.read(block_hash, row, self._host.content(row))

    def _fetch(self, peers: PeerBlocks, hashes: Sequence[BlockHash], origin: PromptOrigin) -> None:
        """Ask for blocks that only `origin` has. While others are on their way, a few more are not worth a question."""
        most = min(peers.max_reading, self._host.num_blocks)
        wanted = [each for each in hashes[:most] if self._is_fetched(peers, each, origin)]
        room = most - peers.num_reading
        if not wanted or room < min(len(wanted), most // 2):
            return
        rows = [self._host.take() for _ in wanted[:room]]
        contents = [self._host.content(row) for row in rows]
        peers.read(origin, list(zip(wanted, rows, contents, strict=False)))

    def _is_fetched(self, peers: PeerBlocks, block_hash: BlockHash, origin: PromptOrigin) -> bool:
        is_here = block_hash in self._host or (self._disk is not None and block_hash in self._disk)
        return not is_here and not peers.is_reading(block_hash) and peers.has(origin, block_hash)

    def restore(self, blocks: Sequence[CachedBlock]) -> None:
        """Copy blocks that are in memory to blocks of the cache."""
        started = perf_counter()
        rows = [self._host.find(block_hash) for _, block_hash in blocks]
        self._runner.write_blocks([block for block, _ in blocks], [self._host.content(row) for row in rows])
        seconds = perf_counter() - started
        self._restore_s += seconds
        self.write_s += RATE * (seconds / len(blocks) - self.write_s)
        if self._is_transit:
            for _, block_hash in blocks:
                self._host.drop(block_hash)
        num_from_disk = _take_out(self._from_disk, blocks)
        self._num_disk_hits += num_from_disk
        self._num_hits += len(blocks) - num_from_disk - _take_out(self._from_peers, blocks)

    def seconds(self, extent: Extent) -> float:
        """Return what it is expected to take to bring blocks back."""
        disk_s = 0.0 if self._disk is None else self._disk.read_s
        peer_s = 0.0 if self._peers is None else self._peers.read_s
        return extent.num_blocks * self.write_s + extent.num_on_disk * disk_s + extent.num_at_peers * peer_s

    # -- both

    def finish_transfers(self) -> None:
        """Take up what the disk's thread has done and what other engines have sent since the last call."""
        if self._peers is not None:
            self._take_arrivals(self._peers)
        if self._disk is None:
            return
        for transfer in self._disk.finished():
            if not transfer.is_read:
                self._host.sent(transfer.block_hash)
                self._num_disk_stored += transfer.error is None
                continue
            self._num_damaged += transfer.is_damaged
            if transfer.is_damaged or transfer.error is not None or transfer.block_hash in self._host:
                self._host.give_back(transfer.row)
                continue
            self._make_room()
            self._host.keep(transfer.block_hash, transfer.row)
            self._from_disk.add(transfer.block_hash)

    def _take_arrivals(self, peers: PeerBlocks) -> None:
        for arrival in peers.finished():
            if arrival.is_missing or arrival.block_hash in self._host:
                self._host.give_back(arrival.row)
            else:
                self._make_room()
                self._host.keep(arrival.block_hash, arrival.row)
                self._from_peers.add(arrival.block_hash)

    def stats(self) -> KvTierStats | None:
        """Return None where nothing is kept: blocks of other engines only pass through."""
        if self._is_transit:
            return None
        disk = self._disk
        return KvTierStats(
            host_blocks=len(self._host),
            host_capacity=self._host.num_blocks,
            host_stored_total=self._num_stored,
            host_lost_total=self._num_lost,
            host_hits_total=self._num_hits,
            disk_blocks=0 if disk is None else len(disk),
            disk_capacity=0 if disk is None else disk.num_blocks,
            disk_stored_total=self._num_disk_stored,
            disk_lost_total=self._num_disk_lost,
            disk_hits_total=self._num_disk_hits,
            disk_damaged_total=self._num_damaged,
            is_disk_off=disk is not None and disk.is_off,
            restored_tokens_total=(self._num_hits + self._num_disk_hits) * self._runner.info.block_size,
            restore_seconds_total=self._restore_s,
            slower_total=self.num_slower,
            late_total=self.num_late,
        )

    def close(self, cached: Sequence[CachedBlock]) -> None:
        """Write what only memory has to the disk, for at most CLOSE_S: blocks of the cache, `cached`, the most recently
        used first, then those of the host tier. Then end the disk's thread."""
        disk = self._disk
        if disk is None:
            return
        deadline = perf_counter() + CLOSE_S
        block_of = {block_hash: block for block, block_hash in cached}
        hashes = list(dict.fromkeys((*block_of, *self._host.newest())))[: disk.num_blocks]
        for block_hash in hashes:
            self._await_writes(self._max_transfers - 1, deadline)
            if disk.is_off or perf_counter() > deadline:
                break
            if disk.has_room and not disk.holds(block_hash):
                row = self._leaving_row(block_hash, block_of.get(block_hash))
                disk.write(block_hash, row, self._host.content(row))
        self._await_writes(0, deadline)
        for block_hash in reversed(hashes):  # the index has the most recently used last
            disk.holds(block_hash)
        disk.close()

    def _leaving_row(self, block_hash: BlockHash, block: int | None) -> int:
        if block_hash in self._host:
            return self._host.send(block_hash)
        assert block is not None, "the block is in the cache if it is not in the host tier"
        row = self._host.take()
        self._runner.read_blocks([block], [self._host.content(row)])
        self._host.leave(block_hash, row)
        return row

    def _await_writes(self, num_left: int, deadline: float) -> None:
        assert self._disk is not None
        self.finish_transfers()
        while self._disk.num_writing > num_left and perf_counter() < deadline:
            sleep(POLL_S)
            self.finish_transfers()

    def check(self) -> None:
        """Assert that rows and slots add up."""
        num_reading = 0 if self._disk is None else self._disk.num_reading
        self._host.check(num_reading + (0 if self._peers is None else self._peers.num_reading))
        if self._disk is not None:
            self._disk.check()


def _take_out(found: set[BlockHash], blocks: Sequence[CachedBlock]) -> int:
    """Remove the blocks from `found`. Returns how many of them were there."""
    before = len(found)
    found.difference_update(block_hash for _, block_hash in blocks)
    return before - len(found)


def _num_in_transit(block_bytes: int) -> int:
    """Return how many rows there are for blocks on their way, half of them for each direction."""
    return min(max(TRANSIT_BYTES // block_bytes, MIN_TRANSIT), MAX_TRANSIT) // 2 * 2


def make_transit(runner: Runner, peers: PeerBlocks) -> KvTiers:
    """Create what an engine without tiers needs to take blocks of other engines."""
    return KvTiers(
        runner, HostTier(runner.block_bytes, peers.max_reading, peers.max_reading), None, peers, is_transit=True
    )


def make_tiers(runner: Runner, config: EngineConfig, peers: PeerBlocks | None = None) -> KvTiers | None:
    """Create the tiers that `config` asks for, None where it asks for none, which take blocks of `peers` too. Raises
    INVALID for a size below one block, and without prefix reuse; UNIMPLEMENTED for a runner whose blocks cannot be
    copied."""
    is_on_disk = config.kv_disk_cache is not None
    if not config.kv_host_cache_bytes and not is_on_disk:
        return None
    param = "kv_host_cache_bytes" if config.kv_host_cache_bytes else "kv_disk_cache"
    if not runner.block_bytes:
        message = f"the runtime {runner.info.runtime} cannot copy KV blocks; serve without {param}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=param)
    if not config.enable_prefix_caching:
        raise invalid(param, f"{param} keeps the blocks of the prefix cache, which enable_prefix_caching turns off")
    num_in_transit = _num_in_transit(runner.block_bytes) if is_on_disk else MIN_TRANSIT
    num_host = num_in_transit
    if config.kv_host_cache_bytes:
        num_host = _num_blocks("kv_host_cache_bytes", config.kv_host_cache_bytes, runner)
    disk = None
    if config.kv_disk_cache is not None:
        num_disk = _num_blocks("kv_disk_cache_bytes", config.kv_disk_cache_bytes, runner)
        identity = block_identity(config.model_path, runner)
        disk = DiskTier(Path(config.kv_disk_cache), identity, runner.block_bytes, num_disk)
    try:
        host = HostTier(runner.block_bytes, num_host, num_in_transit + (0 if peers is None else peers.max_reading))
    except (MemoryError, ValueError) as error:
        message = f"the KV tier of {config.kv_host_cache_bytes} bytes cannot be allocated: {error}"
        raise invalid("kv_host_cache_bytes", message) from error
    if config.kv_host_cache_bytes > (free_bytes := available_bytes()):
        log.warning(
            "the KV tier in memory may grow to %d MiB, and only %d MiB are free: the system may end the engine",
            config.kv_host_cache_bytes >> 20,
            free_bytes >> 20,
        )
    log.info("the KV tier in memory has %d blocks, %d MiB", num_host, num_host * runner.block_bytes >> 20)
    return KvTiers(runner, host, disk, peers)


def _num_blocks(param: str, size_bytes: int, runner: Runner) -> int:
    num_blocks = size_bytes // runner.block_bytes
    if num_blocks < 1:
        raise invalid(
            param,
            f"{param} must have room for one KV block of this model, {runner.block_bytes} bytes; got {size_bytes}",
        )
    return num_blocks
