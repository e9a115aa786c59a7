"""Prompts handed over between engines of a real model, and over TCP with keys."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from sluice.engine.client.attached import AttachedEngineClient
from sluice.engine.client.base import Replica
from sluice.engine.config import EngineConfig, EngineRole, Listening
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.handover import HandoverOutcome
from sluice.engine.fleet.local import make_engine
from sluice.errors import SluiceError
from tests.engine.client.test_over_tcp import ANY_PORT, Keys, listening
from tests.engine.client.test_recovery import request
from tests.engine.fake_runner import echo
from tests.engine.fleet.test_handover import long_prompts, read
from tests.engine.parts import make_request
from tests.engine.runners.goldens import checkpoint_path
from tests.under_test import runtime
from tests.waiting import PATIENCE_S, until

PROMPTS = [[(first + 7 * position) % 250 + 3 for position in range(200)] for first in (1, 2, 3)]
WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
)
"""Greedy, sampled, and sampled with what counts the prompt's tokens."""


def check_taken(answers: list[tuple[list[int], int | None]]) -> None:
    """Check that whole prompts came from the other engine. A busy machine computes some sooner than they come."""
    taken = {num_cached for _, num_cached in answers}
    assert 192 in taken and taken <= {0, 192}


@pytest.mark.slow
async def test_the_tokens_are_those_of_one_engine() -> None:
    config = EngineConfig(
        model_path=str(checkpoint_path("llama_tiny")), runtime=runtime(), num_blocks=200, num_threads=1
    )
    client = make_engine(config, 2, num_prefill=1, min_split_tokens=64)
    assert isinstance(client, FleetClient)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            prefill, decode = (each.engine for each in client.replicas)
            assert (prefill.info.is_prefill, decode.info.is_prefill) == (True, False)
            for way in WAYS:
                fields = {"max_tokens": 24, "ignore_eos": True, **way}
                requests = [make_request(prompt, "r", cache_salt=f"{way} together", **fields) for prompt in PROMPTS]
                alone = [make_request(prompt, "r", cache_salt=f"{way} alone", **fields) for prompt in PROMPTS]
                answers = await asyncio.gather(*(read(client.submit(each)) for each in requests))
                expected = await asyncio.gather(*(read(decode.submit(each)) for each in alone))
                assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
                check_taken(answers)
                assert [num_cached for _, num_cached in expected] == [0, 0, 0]
            num_prompts = client.handover.outcomes.total()
            assert client.handover.outcomes[HandoverOutcome.HANDED_OVER] >= len(WAYS)
            unlike = make_request(PROMPTS[0], "r", max_tokens=2, prompt_logprobs=0)
            await read(client.submit(unlike))
            assert client.handover.outcomes.total() == num_prompts
    finally:
        await client.stop()


@pytest.mark.parametrize(
    ("has_key", "is_allowed"), [(True, True), (True, False), (False, False)], ids=["allowed", "not allowed", "no key"]
)
async def test_engines_elsewhere_hand_over_prompts_with_keys(tmp_path: Path, has_key: bool, is_allowed: bool) -> None:
    """The prefill engine takes another engine as it takes gateways: its key must be in the folder."""
    keys, prompts = Keys(tmp_path), long_prompts(2, 20, 1000)
    gateway = keys.client("gateway")
    if is_allowed:
        keys.allow(keys.folder / "engine.key")
    prefill, generate = keys.listening(), keys.listening() if has_key else Listening(endpoints=[ANY_PORT])
    async with AsyncExitStack() as stack:
        roles = ((prefill, EngineRole.PREFILL), (generate, EngineRole.GENERATE))
        launchers = [await stack.enter_async_context(listening(tmp_path, how, role=role)) for how, role in roles]
        config, curves = EngineConfig(model_path=""), (gateway, gateway if has_key else None)
        clients = [
            AttachedEngineClient(config, each.endpoints[0], curve=curve)
            for each, curve in zip(launchers, curves, strict=True)
        ]
        client = FleetClient(config, [Replica(str(number), each) for number, each in enumerate(clients)])
        stack.push_async_callback(client.stop)
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            answers = await asyncio.gather(*(read(client.submit(request(prompt, 20))) for prompt in prompts))
            assert [tokens for tokens, _ in answers] == [echo(prompt, 20) for prompt in prompts]
            assert [num_cached for _, num_cached in answers] == ([992, 992] if is_allowed else [0, 0])
            await until(lambda: client.stats.num_running == 0)
            handover = client.stats.handover
            assert (handover.received_blocks_total if handover else 0) == (62 if is_allowed else 0)


@pytest.mark.parametrize(("num_replicas", "num_prefill"), [(1, 1), (2, 2)])
def test_someone_must_generate(num_replicas: int, num_prefill: int) -> None:
    with pytest.raises(SluiceError, match="prefill_replicas must be fewer than replicas") as caught:
        make_engine(EngineConfig(model_path="m"), num_replicas, num_prefill=num_prefill)
    assert caught.value.param == "prefill_replicas"
