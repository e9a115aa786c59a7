"""Prompts and first tokens that one engine of TensorRT-LLM computes for another, in real engine processes."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.handover import HandoverOutcome, SplitReason
from sluice.engine.fleet.local import make_engine
from tests.engine.delegated.tensorrt_llm.over_stand_in import StandIn, answer, echo, request, tokens
from tests.waiting import PATIENCE_S, until

PROMPTS = [[(first + 7 * position) % 250 + 3 for position in range(200)] for first in range(1, 9)]
LATER = [token + 1 for token in PROMPTS[-1]]
EARLY_AND_LATE = pytest.mark.parametrize("stand_in", ["1.2.1", "1.4.0"], indirect=True)
NUM_MOVED = 192
"""Tokens of whole blocks of each prompt."""


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    return StandIn(monkeypatch, tmp_path, getattr(request, "param", "1.4.0")).set(
        RECORD=tmp_path / "record", FAULT_ONCE=tmp_path / "once"
    )


@asynccontextmanager
async def fleet(stand_in: StandIn, num_replicas: int = 2, **limits: Any) -> AsyncIterator[FleetClient]:
    client = make_engine(stand_in.config(**limits), num_replicas, num_prefill=1, min_split_tokens=64)
    assert isinstance(client, FleetClient)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            yield client
    finally:
        await client.stop()


def kinds(stand_in: StandIn) -> Counter[str]:
    """Return how many requests came of each type but the usual one."""
    return Counter(each["request_type"] for each in stand_in.recorded() if each.get("request_type"))


def signal_engine(client: FleetClient, number: int, what: signal.Signals) -> None:
    [pid] = client.replicas[number].engine.pids
    os.kill(pid, what)


async def until_free(client: FleetClient) -> None:
    await until(lambda: client.stats.num_running == client.stats.num_waiting == client.stats.num_blocks_used == 0)


@EARLY_AND_LATE
async def test_an_answer_begins_with_the_first_token_of_the_other_engine(stand_in: StandIn) -> None:
    async with fleet(stand_in, 3) as client:
        answers = await asyncio.gather(*(answer(client.submit(request(prompt))) for prompt in PROMPTS))
        assert [each.token_ids for each in answers] == [echo(prompt, 20) for prompt in PROMPTS]
        assert {each.num_cached for each in answers} == {NUM_MOVED}
        assert client.handover.outcomes == {HandoverOutcome.HANDED_OVER: len(PROMPTS)}
        assert client.replicas[0].num_prefilled == len(PROMPTS)
        assert kinds(stand_in) == {"context_only": len(PROMPTS), "generation_only": len(PROMPTS)}
        await until_free(client)
        sampled = await tokens(client.submit(request(LATER, temperature=0.7, top_p=0.9)))
        assert sampled == echo(LATER, 20)
        assert client.handover.decisions[SplitReason.SPLIT] == len(PROMPTS) + 1


@EARLY_AND_LATE
async def test_what_another_sampler_could_not_go_on_with_is_computed_whole(stand_in: StandIn) -> None:
    whole: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0, "seed": 7},
        {"frequency_penalty": 0.5},
        {"min_tokens": 3, "ignore_eos": False},
        {"max_tokens": 1},
    )
    async with fleet(stand_in) as client:
        for fields, prompt in zip(whole, PROMPTS, strict=False):
            assert await tokens(client.submit(request(prompt, **fields)))
        assert client.handover.decisions == {SplitReason.WHOLE: len(whole)}
        assert not kinds(stand_in)
        likely = await answer(client.submit(request(LATER, logprobs=1)))
        assert [each.token_id for each in likely.logprobs] == likely.token_ids == echo(LATER, 20)
        has_first = client.info.runtime_version != "1.2.1"
        assert client.handover.decisions[SplitReason.SPLIT] == has_first


@EARLY_AND_LATE
async def test_an_answer_of_one_token_is_not_gone_on_with(stand_in: StandIn) -> None:
    """Its length ends it at the context server before the stop token is looked for."""
    [end] = echo(PROMPTS[0], 1)
    async with fleet(stand_in) as client:
        assert await tokens(client.submit(request(PROMPTS[0], stop_token_ids=(end,)))) == [end]
        assert client.handover.outcomes == {HandoverOutcome.REFUSED: 1}
        assert kinds(stand_in) == {"context_only": 1}


async def test_a_context_server_that_is_lost_fails_no_request(stand_in: StandIn) -> None:
    async with fleet(stand_in.set(STEP_MS=1000)) as client:
        streams = [client.submit(request(prompt, 2)) for prompt in PROMPTS[:2]]
        await until(lambda: kinds(stand_in)["context_only"] == 2)
        signal_engine(client, 0, signal.SIGKILL)
        assert await asyncio.gather(*map(tokens, streams)) == [echo(prompt, 2) for prompt in PROMPTS[:2]]
        assert client.handover.outcomes == {HandoverOutcome.LOST: 2}
        assert not kinds(stand_in)["generation_only"]


async def test_blocks_whose_server_is_lost_are_computed(stand_in: StandIn) -> None:
    """The request waits for its turn, with what a server that is gone has handed over."""
    async with fleet(stand_in.set(STEP_MS=20), max_num_seqs=1) as client:
        first = client.submit(request([5, 6, 7], 600))
        await until(lambda: bool(first.output_token_ids))
        second = client.submit(request(PROMPTS[0]))
        await until(lambda: client.handover.outcomes[HandoverOutcome.HANDED_OVER] == 1)
        signal_engine(client, 0, signal.SIGKILL)
        first.cancel()
        whole = await answer(second)
        assert (whole.token_ids, whole.num_cached) == (echo(PROMPTS[0], 20), 0)
        assert kinds(stand_in) == {"context_only": 1, "generation_only": 1}
        assert client.replicas[1].engine.recoveries.num_restarts == 0


async def test_blocks_that_are_gone_are_waited_for_and_computed(stand_in: StandIn) -> None:
    settings = {"cache_transceiver_config.kv_transfer_timeout_ms": "500"}
    async with fleet(stand_in.set(FAULT="transfer_lost"), runtime_settings=settings) as client:
        answers = await asyncio.gather(*(answer(client.submit(request(prompt))) for prompt in PROMPTS[:3]))
        assert [each.token_ids for each in answers] == [echo(prompt, 20) for prompt in PROMPTS[:3]]
        assert sorted(each.num_cached or 0 for each in answers) == [0, NUM_MOVED, NUM_MOVED]
        await until_free(client)
        handover = client.stats.handover
        assert handover is not None
        assert (handover.received_blocks_total, handover.late_total) == (2 * NUM_MOVED // 32, 1)


async def test_a_stream_whose_generation_server_is_lost_goes_on(stand_in: StandIn) -> None:
    async with fleet(stand_in.set(STEP_MS=20), 3) as client:
        stream = client.submit(request(PROMPTS[0], 60))
        await until(lambda: len(stream.output_token_ids) >= 5)
        [number] = [n for n in (1, 2) if client.replicas[n].engine.open_streams]
        signal_engine(client, number, signal.SIGKILL)
        assert await tokens(stream) == echo(PROMPTS[0], 60)
        assert kinds(stand_in) == {"context_only": 1, "generation_only": 1}


async def test_a_cancelled_request_leaves_nothing_behind(stand_in: StandIn) -> None:
    """The context server has answered by then: it keeps its blocks until the time of a transfer is over."""
    settings = {"cache_transceiver_config.kv_transfer_timeout_ms": "200"}
    limits: dict[str, Any] = {"max_num_seqs": 1, "num_blocks": 14, "runtime_settings": settings}
    async with fleet(stand_in.set(STEP_MS=10), **limits) as client:
        first = client.submit(request([5, 6, 7], 300))
        await until(lambda: bool(first.output_token_ids))
        second = client.submit(request(PROMPTS[0]))
        await until(lambda: client.handover.outcomes[HandoverOutcome.HANDED_OVER] == 1)
        second.cancel()
        first.cancel()
        await until_free(client)
        assert await tokens(client.submit(request(PROMPTS[1]))) == echo(PROMPTS[1], 20)
        assert client.handover.outcomes[HandoverOutcome.HANDED_OVER] == 2
