"""Blocks that another engine has computed are taken from it, and whatever goes wrong there, the tokens are the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.arrays import ByteArray
from sluice.engine.blocks import BlockHash, PromptOrigin
from sluice.engine.frames import BlockPiece, Cancel, FetchBlocks
from sluice.engine.kv_tiers import peers, returns
from sluice.engine.statistics import HandoverStats
from sluice.engine.types import BlockSource
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.scripted_executor import Arrivals, ScriptedExecutor, requests

LONG = list(range(41))
"""A prompt of ten full blocks of four tokens, and a token."""
HERE = BlockSource("here", 10)


class Wire(peers.BlockExchange):
    """Carries blocks between two executors of one test."""

    def __init__(self) -> None:
        self.target: ScriptedExecutor | None = None
        self.inbox: list[tuple[BlockPiece, memoryview]] = []
        self.questions: list[FetchBlocks] = []
        self.forgotten: list[str] = []
        self.change: Callable[[BlockPiece, bytes], tuple[BlockPiece, bytes] | None] = lambda *parts: parts

    def ask(self, source: BlockSource, question: FetchBlocks) -> None:
        self.questions.append(question)
        if self.target is not None:
            self.target.script.pending.append(question)

    def send(self, piece: BlockPiece, content: ByteArray | None) -> None:
        changed = self.change(piece, b"" if content is None else content.tobytes())
        if changed is not None:
            self.inbox.append((changed[0], memoryview(changed[1])))

    def receive(self) -> list[tuple[BlockPiece, memoryview]]:
        came, self.inbox = self.inbox, []
        return came

    def forget(self, endpoint: str) -> None:
        self.forgotten.append(endpoint)

    def close(self) -> None: ...


class Pair:
    """An engine that computes prompts, and one that takes them."""

    def __init__(self, prefill_runner: EchoRunner | None = None, **limits: Any) -> None:
        self.wire = Wire()

        class Connected(ScriptedExecutor):
            exchange = self.wire

        self.prefill = Connected(prefill_runner)
        self.decode = Connected(**limits)
        self.wire.target = self.prefill

    def compute(self, prompt: list[int], **fields: object) -> None:
        """Have the first one compute a prompt."""
        self.prefill.submit(len(self.prefill.tokens), prompt, max_tokens=1, **fields)
        self.prefill.finish()

    def step(self) -> None:
        self.prefill.step()
        self.decode.step()

    def generate(self, stream_id: int, prompt: list[int], source: BlockSource = HERE, **fields: object) -> list[int]:
        """Have the second one answer, and return the tokens."""
        self.decode.submit_from(source, stream_id, prompt, max_tokens=5, **fields)
        for _ in range(1000):
            if self.decode.reasons[stream_id]:
                return self.decode.tokens[stream_id]
            self.step()
        raise AssertionError("the request never ends")

    def num_cached(self, stream_id: int) -> int | None:
        return self.decode.details[stream_id].num_cached_tokens

    @property
    def stats(self) -> HandoverStats:
        stats = self.decode.executor.stats().handover
        assert stats is not None
        return stats


def test_a_prompt_that_was_computed_elsewhere_counts_as_cached() -> None:
    pair = Pair()
    pair.compute(LONG)
    assert pair.generate(0, LONG) == echo(LONG, 5)
    assert pair.num_cached(0) == 40
    assert (pair.stats.received_blocks_total, pair.stats.received_bytes_total) == (10, 320)
    sent = pair.prefill.executor.stats().handover
    assert sent is not None
    assert (sent.sent_blocks_total, sent.sent_bytes_total) == (10, 320)
    assert pair.decode.executor.stats().kv_tiers is None, "no tiers were asked for"
    assert pair.decode.executor.stats().num_blocks_free == 24


def test_what_is_here_already_is_not_asked_for() -> None:
    pair = Pair()
    pair.compute(LONG)
    pair.generate(0, LONG[:21], BlockSource("here", 5))
    assert pair.generate(1, LONG) == echo(LONG, 5)
    assert [len(each.hashes) // 16 for each in pair.wire.questions] == [5, 5]
    assert pair.num_cached(1) == 40


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization", "static_batch"])
@settings(deadline=None, max_examples=8)
@given(arrivals=requests, computed=st.integers(0, 20), lost=st.sets(st.integers(0, 40)), tier=st.sampled_from([0, 512]))
def test_everyone_gets_the_right_tokens_under_pressure(
    policy: str, arrivals: Arrivals, computed: int, lost: set[int], tier: int
) -> None:
    """Some prompts were computed elsewhere, some only seem to, and some answers are lost."""
    pair = Pair(scheduler_policy=policy, kv_host_cache_bytes=tier)
    answers = iter(range(10_000))
    pair.wire.change = lambda piece, content: None if next(answers) in lost else (piece, content)
    for prompt, _, _ in arrivals[:computed]:
        pair.compute(prompt)
    for step in range(32):
        for stream_id, (prompt, max_tokens, arrival) in enumerate(arrivals):
            if arrival == step:
                source = BlockSource("here", len(prompt) // 4)
                pair.decode.submit_from(source, stream_id, prompt, max_tokens=max_tokens)
        pair.step()
    for _ in range(2000):
        if all(pair.decode.reasons[stream_id] for stream_id in range(len(arrivals))):
            break
        pair.decode.now += 0.05
        pair.step()
    for stream_id, (prompt, max_tokens, _) in enumerate(arrivals):
        assert pair.decode.tokens[stream_id] == echo(prompt, max_tokens)
    assert pair.decode.executor.stats().num_blocks_free == 24


def test_an_engine_that_never_answers_delays_a_request_and_no_more() -> None:
    pair = Pair()
    pair.wire.target = None
    pair.decode.submit_from(HERE, 0, LONG, max_tokens=5)
    for _ in range(20):
        pair.decode.step()
    assert pair.decode.executor.stats().num_waiting == 1
    pair.decode.now += returns.FIRST_WAIT_S
    pair.decode.finish()
    assert pair.decode.tokens[0] == echo(LONG, 5)
    pair.decode.now += peers.SILENT_S
    pair.decode.submit(1, LONG[:9], max_tokens=5)
    pair.decode.finish()
    assert (pair.stats.failed_total, pair.stats.late_total) == (1, 1)
    assert pair.wire.forgotten == ["here"]
    asked = len(pair.wire.questions)
    assert pair.generate(2, [7] * 30, BlockSource("here", 7)) == echo([7] * 30, 5)
    assert len(pair.wire.questions) == asked, "it is avoided for a while"


def test_an_engine_is_silent_only_where_it_answers_no_question() -> None:
    """It answers one after the other, so that the last one waits for the others."""
    wire, now = Wire(), 0.0
    engine = peers.PeerBlocks(wire, "same", 8, lambda: now)
    for each in (BlockHash(b"a" * 16), BlockHash(b"b" * 16)):
        engine.read(PromptOrigin(HERE, [each]), [(each, 0, np.zeros(8, np.uint8))])
    first, second = wire.questions
    for _ in range(3):
        now += 0.9 * peers.SILENT_S
        wire.inbox.append((BlockPiece(first.number, 0, False), memoryview(b"")))
        assert engine.finished() == []
    now += 0.9 * peers.SILENT_S
    wire.inbox.append((BlockPiece(second.number, 1, True), memoryview(b"12345678")))
    assert engine.finished() == [peers.ArrivedBlock(BlockHash(b"b" * 16), 0, False)]
    now += 1.1 * peers.SILENT_S
    assert engine.finished() == [peers.ArrivedBlock(BlockHash(b"a" * 16), 0, True)]
    assert (engine.num_failed, wire.forgotten) == (1, ["here"])


def test_blocks_on_their_way_are_waited_for_as_long_as_they_are_worth() -> None:
    pair = Pair()
    pair.compute(LONG)
    pair.decode.executor._intake.forecast.pace.observe(1, 0.05)
    pair.decode.submit_from(HERE, 0, LONG, max_tokens=5)
    pair.wire.target = None
    pair.decode.step()
    pair.decode.now += 0.9 * returns.PEER_WORTH * 2.0
    pair.decode.step()
    assert pair.decode.executor.stats().num_waiting == 1, "computing takes 2 s"
    pair.decode.now += 0.2 * returns.PEER_WORTH * 2.0
    pair.decode.finish()
    assert pair.stats.late_total == 1


def test_blocks_that_are_gone_are_computed() -> None:
    pair = Pair()
    pair.compute(LONG[:20])
    assert pair.generate(0, LONG) == echo(LONG, 5)
    assert pair.num_cached(0) == 20
    assert (pair.stats.received_blocks_total, pair.stats.missing_blocks_total) == (5, 5)


def test_salts_and_prompts_keep_blocks_apart() -> None:
    pair = Pair()
    pair.compute(LONG, cache_salt="a")
    assert pair.generate(0, LONG, cache_salt="b") == echo(LONG, 5)
    assert pair.num_cached(0) == 0
    assert pair.generate(1, LONG, cache_salt="a") == echo(LONG, 5)
    assert pair.num_cached(1) == 40


def test_an_engine_of_another_layout_refuses(caplog: pytest.LogCaptureFixture) -> None:
    other = EchoRunner(num_blocks=24, block_size=4, max_model_len=64)
    other.block_identity = "another"
    pair = Pair(other)
    pair.compute(LONG)
    assert pair.generate(0, LONG) == echo(LONG, 5)
    assert (pair.num_cached(0), pair.stats.failed_total) == (0, 1)
    assert "the same model files, types of cache" in caplog.text


@pytest.mark.parametrize("num_blocks", [1, 99])
def test_an_answer_of_another_size_is_refused(num_blocks: int) -> None:
    pair = Pair()
    pair.wire.change = lambda piece, content: (BlockPiece(piece.number, num_blocks, True), content)
    pair.compute(LONG)
    assert pair.generate(0, LONG) == echo(LONG, 5)
    assert (pair.num_cached(0), pair.stats.failed_total) == (0, 1)


def test_a_long_prompt_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PIECE_BYTES", 64)
    monkeypatch.setattr(peers, "PEER_BYTES", 1)  # four blocks at a time
    pair = Pair()
    pair.compute(LONG)
    assert pair.generate(0, LONG) == echo(LONG, 5)
    assert pair.num_cached(0) == 40
    assert max(len(each.hashes) // 16 for each in pair.wire.questions) == 4


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    pair = Pair()
    pair.compute(LONG)
    pair.decode.submit_from(HERE, 0, LONG, max_tokens=5)
    pair.decode.step()
    pair.decode.script.pending.append(Cancel(0))
    for _ in range(5):
        pair.step()
    assert pair.decode.executor.stats().num_waiting == 0
    assert pair.decode.executor.stats().num_blocks_free == 24
    assert pair.generate(1, LONG) == echo(LONG, 5)
    assert pair.num_cached(1) == 40


def test_a_host_tier_takes_blocks_of_others_too() -> None:
    pair = Pair(kv_host_cache_bytes=100 * 32)
    pair.compute(LONG)
    assert pair.generate(0, LONG) == echo(LONG, 5)
    assert pair.num_cached(0) == 40
    tiers = pair.decode.executor.stats().kv_tiers
    assert tiers is not None
    assert (tiers.host_blocks, tiers.host_hits_total, pair.stats.received_blocks_total) == (10, 0, 10)
