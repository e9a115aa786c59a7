"""An engine's part in handing over prompts: it sends blocks to engines that ask, and takes blocks of others."""

from collections.abc import Callable

from sluice.engine.blocks import PromptOrigin
from sluice.engine.config import EngineConfig
from sluice.engine.frames import FetchBlocks
from sluice.engine.kv_cache import BlockPool
from sluice.engine.kv_tiers.identity import portable_identity
from sluice.engine.kv_tiers.peers import BlockExchange, BlockExports, PeerBlocks
from sluice.engine.kv_tiers.tiers import KvTiers, make_transit
from sluice.engine.runners.base import Runner
from sluice.engine.sequence import Sequence
from sluice.engine.statistics import HandoverStats
from sluice.engine.types import BlockSource


class Handover:
    """Used by the engine thread alone."""

    def __init__(
        self, runner: Runner, config: EngineConfig, exchange: BlockExchange, clock: Callable[[], float]
    ) -> None:
        self.identity = portable_identity(config.model_path, runner)
        self.peers = PeerBlocks(exchange, self.identity, runner.block_bytes, clock)
        self._runner = runner
        self._exchange = exchange
        self._exports: BlockExports | None = None
        self._transit: KvTiers | None = None
        self.is_sending = False
        """Whether blocks are asked for that were not sent yet."""

    def offer(self, pool: BlockPool) -> None:
        """Send the blocks of this pool from now on."""
        self._exports = BlockExports(self._runner, pool, self.identity, self._exchange.send)

    def answer(self, question: FetchBlocks) -> None:
        """Take a question of another engine."""
        assert self._exports is not None, "the pool is there before commands are"
        self._exports.add(question)
        self.is_sending = self._exports.is_sending

    def send(self, max_seconds: float) -> None:
        """Send blocks, as far as the time of a step allows."""
        assert self._exports is not None
        self._exports.send(max_seconds)
        self.is_sending = self._exports.is_sending

    def make_transit(self) -> KvTiers:
        """Create what takes the blocks of others, for an engine without KV tiers."""
        self._transit = make_transit(self._runner, self.peers)
        return self._transit

    def trace(self, sequence: Sequence, source: BlockSource) -> None:
        """Note where the first blocks of a sequence that waits are to be had."""
        num_blocks = min(source.num_blocks, sequence.num_prompt // self._runner.info.block_size)
        sequence.origin = PromptOrigin(source, sequence.block_hashes(num_blocks))

    def stats(self) -> HandoverStats | None:
        """Return None where nothing was sent or asked for."""
        exports, peers = self._exports, self.peers
        num_late = 0 if self._transit is None else self._transit.num_slower + self._transit.num_late
        counts = peers.num_received, peers.num_missing, peers.num_failed, num_late
        if exports is None or not (exports.num_sent or any(counts)):
            return None
        return HandoverStats(
            sent_blocks_total=exports.num_sent,
            sent_bytes_total=exports.sent_bytes,
            send_seconds_total=exports.send_s,
            received_blocks_total=peers.num_received,
            received_bytes_total=peers.received_bytes,
            receive_seconds_total=peers.receive_s,
            missing_blocks_total=peers.num_missing,
            failed_total=peers.num_failed,
            late_total=num_late,
        )

    def close(self) -> None:
        self._exchange.close()


def make_handover(
    runner: Runner, config: EngineConfig, exchange: BlockExchange | None, clock: Callable[[], float]
) -> Handover | None:
    """Create an engine's part; None for one without an exchange or a prefix cache, or whose blocks cannot be copied."""
    if exchange is None or not config.enable_prefix_caching or not runner.block_bytes:
        return None
    return Handover(runner, config, exchange, clock)
