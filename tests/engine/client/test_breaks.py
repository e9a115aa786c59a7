"""A wire to the engine that breaks before each of its messages in turn, in each way: no answer changes by it."""

import msgspec
import pytest

from sluice.engine.client.stream import GenerationStream
from sluice.engine.types import TokenEvent
from tests.engine.client.virtual import Break, Fault, Plan, in_virtual_time, virtual
from tests.engine.parts import make_request

NUM_TOKENS = 5
CONVERSATIONS = {
    "a greedy answer": [make_request([5, 6, 7], "a", max_tokens=NUM_TOKENS)],
    "a sampled answer": [make_request([5, 6], "a", max_tokens=NUM_TOKENS, temperature=1.0)],
    "a seeded answer with log probabilities": [
        make_request([5, 6], "a", max_tokens=NUM_TOKENS, temperature=0.7, seed=77, logprobs=2, prompt_logprobs=1)
    ],
    "a prompt of several chunks": [make_request([*range(40)], "a", max_tokens=NUM_TOKENS)],
    "three answers beside each other": [
        make_request([n, 2, 3], str(n), max_tokens=NUM_TOKENS + n, temperature=0.5 * (n % 2)) for n in range(3)
    ],
}


async def whole(stream: GenerationStream) -> list[TokenEvent]:
    return [event async for event in stream]


def joined(events: list[TokenEvent]) -> object:
    """Return what a client sees of an answer. How its tokens are spread over events depends on time."""
    details = [event.detail for event in events if event.detail is not None]
    return (
        [token for event in events for token in event.token_ids],
        events[-1].finish_reason,
        [each for detail in details for each in detail.logprobs or ()],
        [detail.prompt_logprobs for detail in details if detail.prompt_logprobs],
    )


@pytest.mark.parametrize("how", Break, ids=lambda how: how.value)
@pytest.mark.parametrize("name", CONVERSATIONS)
@in_virtual_time
async def test_an_answer_is_the_same_wherever_the_wire_breaks(name: str, how: Break) -> None:
    requests = CONVERSATIONS[name]
    number = 0
    while True:
        async with virtual(Plan([Fault(how, number)])) as client:
            streams = [client.submit(each) for each in requests]
            found = [joined(await whole(stream)) for stream in streams]
            was_broken = client.recoveries.num_restarts == 1
            assert client.failure is None and client.recoveries.num_poisoned == 0
        async with virtual() as client:
            asked = [msgspec.structs.replace(stream.request, resume_token_ids=[]) for stream in streams]
            assert found == [joined(await whole(client.submit(each))) for each in asked], number
        if not was_broken:
            break
        number += 1
    assert number >= NUM_TOKENS
