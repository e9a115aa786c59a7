"""The stand-in's context and generation servers."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_4
from tests.engine.delegated.tensorrt_llm.over_stand_in import echo

PROMPT = list(range(100, 180))
NUM_BLOCKS = 16


@pytest.fixture
def open_server(stand_in: ModuleType, open_llm: Callable[..., Any]) -> Callable[[int], Any]:
    """Make an LLM with a transceiver of this limit in milliseconds, whose cache holds few blocks."""

    def make(limit_ms: int) -> Any:
        transceiver = {"backend": "DEFAULT", "kv_transfer_timeout_ms": limit_ms}
        cache = {"max_tokens": NUM_BLOCKS * 32}
        return open_llm(stand_in, cache_transceiver_config=transceiver, kv_cache_config=cache)

    return make


async def ask(package: ModuleType, llm: Any, max_tokens: int, parts: Any, prompt: list[int] = PROMPT) -> Any:
    params = package.SamplingParams(end_id=2, temperature=None, top_k=1, max_tokens=max_tokens)
    return await llm.generate_async(prompt, params, disaggregated_params=parts)


def num_held(llm: Any) -> int:
    return NUM_BLOCKS - int(llm._worker._kv_cache.num_free)


async def test_a_context_is_held_until_it_is_fetched_once(
    stand_in: ModuleType, open_server: Callable[[int], Any], flavour: str
) -> None:
    context, generation = open_server(60_000), open_server(300)
    first = await ask(stand_in, context, 9, stand_in.DisaggregatedParams(request_type="context_only"))
    told = first.disaggregated_params
    assert first.outputs[0].finish_reason == ("not_finished" if flavour == "1.2.1" else "length")
    assert (first.outputs[0].token_ids, told.first_gen_tokens) == (echo(PROMPT, 1), echo(PROMPT, 1))
    first.abort()
    assert num_held(context) == 3
    parts = replace(told, request_type="generation_only")
    assert (await ask(stand_in, generation, 9, parts)).outputs[0].token_ids == echo(PROMPT, 9)
    with pytest.raises(RuntimeError, match="timed out"):
        await ask(stand_in, generation, 9, parts)
    assert num_held(context) == num_held(generation) == 0


@ONLY_1_4
async def test_a_context_that_nobody_fetches_is_freed_after_a_while(
    stand_in: ModuleType, open_server: Callable[[int], Any]
) -> None:
    context = open_server(200)
    for start in range(8):  # together they need more than there is
        parts = stand_in.DisaggregatedParams(request_type="context_only")
        await ask(stand_in, context, 1, parts, [start, *PROMPT])


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
async def test_without_a_transceiver_the_request_fails(
    stand_in: ModuleType, open_llm: Callable[..., Any], kind: str
) -> None:
    with pytest.raises(RuntimeError, match="kv_cache_transceiver is disabled, please set 'cache_transceiver_config"):
        await ask(stand_in, open_llm(stand_in), 3, stand_in.DisaggregatedParams(request_type=kind))
