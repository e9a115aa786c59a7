"""A request's place in TensorRT-LLM's own queue, and among its ranks."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sluice.engine.delegated.tensorrt_llm.llm import share_of
from sluice.engine.types import BACKGROUND_PRIORITY
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.over_stand_in import StandIn, request, running, tokens
from tests.waiting import until

POLICY = "scheduler_config.waiting_queue_policy"
AFFINITY = "attention_dp_config.kv_cache_routing_conversation_affinity"
NUM_PLACES = 32
"""Places of a batch; two more requests than these are handed over early."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    stand_in = StandIn(monkeypatch, tmp_path, "1.3.0")
    return stand_in.set(RECORD=stand_in.record)


def test_priorities_keep_their_order_as_the_floats_of_the_executor() -> None:
    ours = [-(1 << 20), -100, -2, -1, 0, 1, 2, 100, 65000, BACKGROUND_PRIORITY]
    theirs = [np.float32(share_of(each)) for each in ours]
    assert theirs == sorted(set(theirs), reverse=True)
    assert theirs[-1] > 0 and theirs[0] <= 1 and share_of(0) == 0.5


@pytest.mark.parametrize(("policy", "first"), [("priority", 1), ("fcfs", 0)])
async def test_the_early_ones_begin_by_priority_where_the_policy_says_so(
    stand_in: StandIn, policy: str, first: int
) -> None:
    stand_in.set(STEP_MS=5)
    settings = {POLICY: policy}
    async with stand_in.client(
        max_num_seqs=NUM_PLACES, max_num_batched_tokens=2048, runtime_settings=settings
    ) as client:
        holders = [await running(client, request([10 + i], 900)) for i in range(NUM_PLACES)]
        early = []
        for number, priority in enumerate((5, -5), len(stand_in.recorded()) + 1):
            early.append(client.submit(request([60 + number], 900, priority=priority)))
            await until(partial(_has_recorded, stand_in, number))  # else our own queue would order them
        holders[0].cancel()
        await until(lambda: any(each.output_token_ids for each in early))
        assert early[first].output_token_ids and not early[1 - first].output_token_ids
        told = [each["priority"] for each in stand_in.recorded()[-2:]]
    assert told == ([share_of(5), share_of(-5)] if policy == "priority" else [0.5, 0.5])


def _has_recorded(stand_in: StandIn, number: int) -> bool:
    return len(stand_in.recorded()) == number


async def test_the_requests_of_a_session_are_a_conversation(stand_in: StandIn) -> None:
    settings = {"enable_attention_dp": "true", AFFINITY: "true"}
    async with stand_in.client(runtime_settings=settings) as client:
        for session in ("abc", ""):
            await tokens(client.submit(request([1, 2], 2, session=session)))
    assert [each["conversation_id"] for each in stand_in.recorded()[-2:]] == ["abc", None]


@pytest.mark.parametrize(("setting", "value"), [(POLICY, "priority"), (AFFINITY, "true")])
async def test_a_version_whose_requests_have_no_place_is_not_asked_for_one(
    stand_in: StandIn, setting: str, value: str
) -> None:
    with pytest.raises(SluiceError, match=f"{setting} cannot be used: requests of TensorRT-LLM 1.3.0rc5 have no") as no:
        async with stand_in.set(VERSION="1.3.0rc5").client(runtime_settings={setting: value}):
            pass
    assert no.value.code is ErrorCode.UNIMPLEMENTED
