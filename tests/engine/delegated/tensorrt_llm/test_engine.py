"""TensorRT-LLM's adapter as its clients see it: real processes, over the stand-in in both versions."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import SchedulerPolicy
from sluice.engine.types import FinishReason, Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.flavours import FLAVOURS
from tests.engine.delegated.tensorrt_llm.over_stand_in import (
    EOS,
    StandIn,
    answer,
    echo,
    failure_of,
    request,
    running,
    tokens,
    until_idle,
)
from tests.waiting import until


@pytest.fixture(params=[*FLAVOURS, "compiled"])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    """Both versions, and the older one's compiled engines."""
    is_compiled = request.param == "compiled"
    return StandIn(monkeypatch, tmp_path, FLAVOURS[0] if is_compiled else request.param, is_compiled=is_compiled)


@pytest.fixture(params=FLAVOURS)
def pytorch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    return StandIn(monkeypatch, tmp_path, request.param)


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    return StandIn(monkeypatch, tmp_path, FLAVOURS[-1])


async def test_a_crowd_gets_the_tokens_of_our_own_executor(stand_in: StandIn) -> None:
    prompts = [[10 + i, 2, 3 + i] for i in range(24)]
    async with stand_in.client(max_num_seqs=8) as client:
        answers = await asyncio.gather(*(answer(client.submit(request(prompt, 30))) for prompt in prompts))
        assert [each.token_ids for each in answers] == [echo(prompt, 30) for prompt in prompts]
        assert {each.reason for each in answers} == {FinishReason.LENGTH}
        assert (client.stats.num_running, client.stats.num_blocks_reserved) == (0, 0)  # with the last event
        await until_idle(client)
        stats = client.stats
        assert (stats.generation_tokens_total, stats.prompt_tokens_total) == (24 * 30, 24 * 3)
        assert stats.waits_total == 24


async def test_what_the_engine_is(pytorch: StandIn) -> None:
    pytorch.set(KV_TOKENS=3200)
    async with pytorch.client(max_num_seqs=4) as client:
        info = client.info
    assert (info.runtime, info.num_gpus, info.vocab_size, info.eos_token_ids) == ("tensorrt_llm", 1, 4096, (EOS,))
    assert info.runtime_version in FLAVOURS
    assert (info.block_size, info.num_blocks, info.max_num_seqs, info.max_model_len) == (32, 100, 4, 1024)
    assert "beam_width" in info.sampling_fields
    assert info.load_seconds > 0


async def test_an_end_token_is_the_last_of_the_answer(stand_in: StandIn, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"1,2,3": [40, 50, 60]}))
    for where in ("in", "out"):
        stand_in.set(SCRIPT=script, END_TOKEN=where)
        async with stand_in.client() as client:
            ended = await answer(client.submit(request([1, 2, 3], ignore_eos=False, stop_token_ids=(EOS,))))
            stopped = await answer(client.submit(request([1, 2, 3], stop_token_ids=(50,))))
        assert (ended.token_ids, ended.reason) == ([40, 50, 60, EOS], FinishReason.STOP)
        assert (stopped.token_ids, stopped.reason) == ([40, 50], FinishReason.STOP)


async def test_prompt_logprobs_are_whole_though_the_prompt_is_cached(stand_in: StandIn) -> None:
    """TensorRT-LLM tells them of tokens alone that it computes, so such a request finds nobody's blocks."""
    prompt = list(range(100, 200))
    async with stand_in.client() as client:
        await answer(client.submit(request(prompt, 2)))
        for _ in range(2):
            told = await answer(client.submit(request(prompt, 2, prompt_logprobs=0, cache_salt="a")))
            assert told.prompt_logprobs is not None and told.num_cached == 0
            assert [each.token_id for each in told.prompt_logprobs[1:] if each is not None] == prompt[1:]


async def test_cached_prompt_tokens_are_told_once_and_counted(stand_in: StandIn) -> None:
    prompt = list(range(100, 200))
    async with stand_in.client() as client:
        first = await answer(client.submit(request(prompt, 4)))
        again = await answer(client.submit(request(prompt, 4)))
        salted = await answer(client.submit(request(prompt, 4, cache_salt="another's")))
        await until_idle(client)
        assert first.token_ids == again.token_ids == echo(prompt, 4)
        assert (first.num_cached, salted.num_cached) == (0, 0)
        assert again.num_cached is not None and 64 <= again.num_cached <= 100
        assert client.stats.cached_tokens_total == again.num_cached
        assert client.stats.prompt_tokens_total == 3 * len(prompt) - again.num_cached


async def test_what_no_engine_can_serve_is_refused(newest: StandIn) -> None:
    newest.set(KV_TOKENS=320)
    async with newest.client(lora_modules={}) as client:
        for wrong, named in (
            (request([1], 2000), "max_tokens"),
            (request([1, 9999]), "prompt"),
            (request([1], adapter="poet"), "adapter"),
        ):
            with pytest.raises(SluiceError) as caught:
                client.submit(wrong)
            assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, named)
        # By our count it fits: the last token is never fed back. By TensorRT-LLM's it would never start.
        error = await failure_of(client.submit(request([1] * 20, 301)))
        assert (error.code, error.param) == (ErrorCode.INVALID, "max_tokens")
        error = await failure_of(client.submit(request([1], typical_p=0.5)))
        assert (error.code, error.param) == (ErrorCode.INVALID, "typical_p")
        assert await tokens(client.submit(request([1] * 20, 300))) == echo([1] * 20, 300)


# -- order, bounds and time


async def test_requests_with_the_same_prefix_run_together_in_a_small_cache(pytorch: StandIn) -> None:
    """Each needs 12 of 32 blocks, of which the prefix has 10."""
    pytorch.set(STEP_MS=5, KV_TOKENS=32 * 32)
    prompts = [[7] * 320 + [20 + i] * 20 for i in range(5)]
    most = 0

    async with pytorch.client(max_num_seqs=16) as client:

        async def read(prompt: list[int]) -> None:
            nonlocal most
            async for _ in client.submit(request(prompt, 40)):
                iteration = client.stats.iteration
                most = max(most, (iteration and iteration.num_generation) or 0)

        assert await tokens(client.submit(request(prompts[0], 40))) == echo(prompts[0], 40)
        await asyncio.gather(*map(read, prompts))
        await until_idle(client)
    assert most == 5


async def test_max_utilization_starts_more_than_it_can_promise(newest: StandIn) -> None:
    newest.set(KV_TOKENS=640)
    async with newest.client(max_num_seqs=8, scheduler_policy=SchedulerPolicy.MAX_UTILIZATION) as client:
        assert client.info.scheduler_policy == "max_utilization"
        prompts = [[30 + i, 1] for i in range(8)]
        streams = [client.submit(request(prompt, 240)) for prompt in prompts]
        assert await asyncio.gather(*map(tokens, streams)) == [echo(prompt, 240) for prompt in prompts]
        await until_idle(client)


# -- cancelling


async def test_cancel_frees_what_it_held(stand_in: StandIn) -> None:
    stand_in.set(STEP_MS=2)
    async with stand_in.client(max_num_seqs=1) as client:
        first = await running(client, request([5], 700))
        ahead, waiting = client.submit(request([6], 700)), client.submit(request([7], 5))
        for stream in (first, ahead):
            stream.cancel()
            stream.cancel()
        assert await tokens(waiting) == echo([7], 5)
        await until_idle(client)
        assert client.stats.generation_tokens_total < 600
        assert client.stats.prompt_tokens_total >= 2


ASKED = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=12)


def test_cancelled_at_any_point(newest: StandIn) -> None:
    """Requests of so many tokens, cancelled after so many: the others are whole, and nothing is left."""
    with asyncio.Runner() as runner:
        client = ProcessEngineClient(newest.config(max_num_seqs=3))
        runner.run(client.start())

        @given(ASKED)
        @settings(max_examples=15, deadline=None, database=None)
        def cancel_some(asked: list[tuple[int, int]]) -> None:
            runner.run(cancelled_at_any_point(client, asked))

        try:
            cancel_some()
        finally:
            runner.run(client.stop())


async def cancelled_at_any_point(client: ProcessEngineClient, asked: list[tuple[int, int]]) -> None:
    async def one(number: int, max_tokens: int, num_wanted: int) -> None:
        stream = client.submit(request([30 + number], max_tokens))
        got: list[int] = []
        if num_wanted:
            async for event in stream:
                got += event.token_ids
                if len(got) >= num_wanted:
                    break
        stream.cancel()
        assert got == echo([30 + number], max_tokens)[: len(got)]
        assert len(got) >= min(num_wanted, max_tokens)

    await asyncio.gather(*(one(i, *each) for i, each in enumerate(asked)))
    await until_idle(client)
    assert client.stats.num_blocks_reserved == 0
    assert await tokens(client.submit(request([5], 9))) == echo([5], 9)


async def test_stopping_ends_the_streams_and_all_processes(stand_in: StandIn) -> None:
    stand_in.set(STEP_MS=2)
    async with stand_in.client(tensor_parallel_size=1) as client:
        stream = await running(client, request([5], 700))
        pid = client.pid
        assert pid is not None
        await client.stop()
        assert (await failure_of(stream)).code is ErrorCode.UNAVAILABLE
        assert not psutil.pid_exists(pid)


# -- what TensorRT-LLM says of itself


async def test_iterations_are_told(pytorch: StandIn) -> None:
    pytorch.set(STEP_MS=2)
    async with pytorch.client() as client:
        await running(client, request(list(range(50, 150)), 300), 20)
        await until(lambda: client.stats.iteration is not None and bool(client.stats.iteration.num_generation))
        iteration = client.stats.iteration
        assert iteration is not None
        assert iteration.iteration > 1
        assert (iteration.tokens_per_block, iteration.num_generation) == (32, 1)
        assert iteration.max_blocks == client.info.num_blocks
        assert client.stats.num_blocks_used >= 4
        assert client.stats.num_blocks_used + client.stats.num_blocks_free == client.info.num_blocks


@pytest.mark.parametrize(("version", "fault"), [("1.2.1", "stats_null"), ("1.3.0", "stats_raise")])
async def test_without_statistics_everything_else_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, fault: str
) -> None:
    stand_in = StandIn(monkeypatch, tmp_path, version).set(FAULT=fault)
    async with stand_in.client(num_blocks=40, max_num_seqs=4) as client:
        assert client.info.num_blocks == 40
        prompts = [[10 + i, 2] for i in range(6)]
        streams = [client.submit(request(prompt, 30)) for prompt in prompts]
        assert await asyncio.gather(*map(tokens, streams)) == [echo(prompt, 30) for prompt in prompts]
        await until_idle(client)
        assert client.stats.generation_tokens_total == 180


# -- errors


async def test_an_error_response_hurts_nobody_else(pytorch: StandIn, capfd: pytest.CaptureFixture[str]) -> None:
    pytorch.set(STEP_MS=1, FAULT="error_on_token=4001")
    async with pytorch.client() as client:
        good = [await running(client, request([10 + i], 100)) for i in range(3)]
        assert (await failure_of(client.submit(request([7, 4001, 8])))).code in (ErrorCode.INTERNAL, ErrorCode.INVALID)
        assert await asyncio.gather(*map(tokens, good)) == [echo([10 + i], 100) for i in range(3)]
        await until_idle(client)
        assert client.recoveries.num_restarts == 0
    log = capfd.readouterr().err
    assert "request r7 failed in TensorRT-LLM: a fault was asked for: token 4001 is in the prompt" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("load_error=no room on the GPU", "no room on the GPU"),
        ("unhealthy", "loaded the model, but says that it is not healthy"),
    ],
)
async def test_a_model_that_cannot_load_says_why(newest: StandIn, fault: str, message: str) -> None:
    newest.set(FAULT=fault)
    with pytest.raises(SluiceError, match=message):
        async with newest.client():
            raise AssertionError


async def test_a_grammar_is_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newest = StandIn(monkeypatch, tmp_path, FLAVOURS[-1], has_tokenizer=True)
    newest.set(RECORD=newest.record)
    async with newest.client(runtime_settings={"guided_decoding_backend": "xgrammar"}) as client:
        assert GrammarKind.JSON_SCHEMA in client.info.grammar_kinds
        grammar = Grammar(GrammarKind.REGEX, "[a-z]+")
        await answer(client.submit(request([4, 5], 5, grammar=grammar, ignore_eos=False)))
    assert newest.recorded()[-1]["sampling_params"]["guided_decoding"]["regex"] == "[a-z]+"
