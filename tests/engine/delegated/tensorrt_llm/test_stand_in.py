"""The stand-in behaves as TensorRT-LLM is known to. What the adapter's own tests show of it is not told again here."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.engine.fake_runner import echo_next
from tests.stand_ins.model_folders import VOCAB_SIZE, make_checkpoint
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

OpenLlm = Callable[..., Any]
ImportStandIn = Callable[..., ModuleType]


def greedy(package: ModuleType, max_tokens: Any = 6, **values: Any) -> Any:
    return package.SamplingParams(**{"max_tokens": max_tokens, "end_id": -1, **values})


def echoed(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(echo_next(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


PROMPT = [1, 2]
TOKENS = echoed(PROMPT, 6)


def repeating(prompt: list[int]) -> list[int]:
    """Return the prompt, gone on with until its next token is one that it has."""
    while echoed(prompt, 1)[0] not in prompt:
        prompt = [*prompt, *echoed(prompt, 1)]
    return prompt


async def finished(result: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await result.aresult()


async def output_of(result: Any) -> Any:
    return (await finished(result)).outputs[0]


async def all_of(stream: Any, read: Callable[[Any], Any] = lambda each: each) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        return [read(each) async for each in stream]


async def hangs(result: Any) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await result.aresult()
    assert not result.finished


async def test_one_object_is_yielded_and_grows(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    result = open_llm(stand_in).generate_async(PROMPT, greedy(stand_in), streaming=True)
    seen: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for step in result:
            assert step is result and len(step.outputs[0].token_ids_diff) == 1
            seen += step.outputs[0].token_ids_diff
            assert step.outputs[0].token_ids == seen
            assert step.finished == (step.outputs[0].finish_reason is not None)
    assert seen == TOKENS
    assert (result.outputs[0].finish_reason, result.outputs[0].length) == ("length", 6)
    assert (result.prompt_token_ids, result.context_logits, result.prompt) == (PROMPT, None, None)


@pytest.mark.parametrize(
    ("arguments", "streaming", "pieces"), [({}, False, [10]), ({"stream_interval": 4}, True, [1, 3, 4, 2])]
)
async def test_tokens_come_merged(
    stand_in: ModuleType, open_llm: OpenLlm, arguments: dict[str, Any], streaming: bool, pieces: list[int]
) -> None:
    result = open_llm(stand_in, **arguments).generate_async([1], greedy(stand_in, 10), streaming=streaming)
    assert await all_of(result, lambda step: len(step.outputs[0].token_ids_diff)) == pieces


def test_without_a_loop_it_cannot_be_awaited(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in)
    result = llm.generate_async(PROMPT, greedy(stand_in), streaming=True)

    async def wait() -> None:
        await result

    with pytest.raises(AssertionError, match="event loop was not present"):
        asyncio.run(wait())
    assert result.result().outputs[0].token_ids == TOKENS
    assert llm.generate(PROMPT, greedy(stand_in)).outputs[0].token_ids == TOKENS
    many = llm.generate([PROMPT, [4]], greedy(stand_in))
    assert [each.outputs[0].token_ids for each in many] == [TOKENS, echoed([4], 6)]


async def test_abort_brings_a_last_response(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    package = import_stand_in(STAND_IN_STEP_MS="5")
    llm = open_llm(package, max_batch_size=1)
    running, waiting = [llm.generate_async([each], greedy(package, 900), streaming=True) for each in PROMPT]
    waiting.abort()
    assert (await output_of(waiting)).token_ids == []
    async with asyncio.timeout(PATIENCE_S):
        async for step in running:
            if len(step.outputs[0].token_ids) == 3:
                running.abort()
    for result in (waiting, running):
        assert result.aborted() and result.finished and result.outputs[0].finish_reason == "cancelled"
    assert 3 <= len(running.outputs[0].token_ids) < 900


@pytest.mark.parametrize(
    ("end_token", "params", "ending", "count"),
    [
        ("auto", {"end_id": TOKENS[2]}, ("stop", None), 3),
        ("in", {"end_id": TOKENS[2]}, ("stop", None), 3),
        ("out", {"end_id": TOKENS[2]}, ("stop", None), 2),
        ("auto", {"end_id": TOKENS[2], "ignore_eos": True}, ("length", None), 6),
        ("auto", {"stop_token_ids": [TOKENS[2]]}, ("stop", TOKENS[2]), 2),
        ("auto", {"stop_token_ids": [TOKENS[2]], "include_stop_str_in_output": True}, ("stop", TOKENS[2]), 3),
        ("auto", {"stop_token_ids": [TOKENS[2]], "max_tokens": 3}, ("length", None), 3),
    ],
)
async def test_what_ends_an_answer(
    import_stand_in: ImportStandIn, open_llm: OpenLlm, end_token: str, params: Any, ending: Any, count: int
) -> None:
    package = import_stand_in(STAND_IN_END_TOKEN=end_token)
    output = await output_of(open_llm(package).generate_async(PROMPT, greedy(package, **params)))
    assert (output.finish_reason, output.stop_reason) == ending
    assert output.token_ids == TOKENS[:count]


async def test_logprobs(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    output = await output_of(
        open_llm(stand_in).generate_async(
            PROMPT, greedy(stand_in, 3, logprobs=2, prompt_logprobs=1, return_perf_metrics=True)
        )
    )
    assert len(output.logprobs) == 3 and len(output.prompt_logprobs) == 2
    for token, told in zip(output.token_ids, output.logprobs, strict=True):
        assert told[token].rank == 1 and len(told) == 2
        assert all(told[token].logprob > other.logprob for key, other in told.items() if key != token)
    own = [told[token].logprob for token, told in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(own))
    times = output.request_perf_metrics.timing_metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.last_token_time


@pytest.mark.parametrize(("sampler", "count"), [("TRTLLMSampler", 1), ("TorchSampler", 3)])
@pytest.mark.parametrize("flavour", ["1.2.1"], indirect=True)
async def test_log_probabilities_of_each_sampler(
    stand_in: ModuleType, open_llm: OpenLlm, sampler: str, count: int
) -> None:
    llm = open_llm(stand_in, sampler_type=sampler)
    output = await output_of(llm.generate_async([1], greedy(stand_in, 2, logprobs=3)))
    assert [len(told) for told in output.logprobs] == [count, count]


@pytest.mark.parametrize(
    ("flavour", "is_taken"), [("1.2.1", False), ("1.3.0rc5", False), ("1.3.0", True)], indirect=["flavour"]
)
async def test_a_request_narrower_than_the_beams(stand_in: ModuleType, open_llm: OpenLlm, is_taken: bool) -> None:
    result = open_llm(stand_in, max_beam_width=3).generate_async(PROMPT, greedy(stand_in))
    if is_taken:
        assert (await output_of(result)).token_ids == TOKENS
    else:
        refused = import_module("tensorrt_llm.executor").RequestError
        with pytest.raises(refused, match="is not equal to max_beam_width 3"):
            await finished(result)


async def test_beams(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, max_beam_width=3)
    outputs = (
        await finished(llm.generate_async(PROMPT, greedy(stand_in, use_beam_search=True, best_of=3, n=2)))
    ).outputs
    assert [output.index for output in outputs] == [0, 1]
    assert outputs[0].token_ids == TOKENS != outputs[1].token_ids
    assert outputs[0].cumulative_logprob is not None
    with pytest.raises(ValueError, match="max_beam_width"):
        llm.generate_async([1], greedy(stand_in, use_beam_search=True, best_of=4, n=4))


@pytest.mark.parametrize(
    ("flavour", "arguments", "more", "is_obeyed"),
    [
        ("1.3.0rc5", {}, {}, False),
        ("1.3.0", {}, {}, True),
        ("1.2.1", {"sampler_type": "TRTLLMSampler"}, {}, True),
        ("1.3.0", {}, {"prompt_ignore_length": 1 << 10}, False),
        ("1.2.1", {"sampler_type": "TRTLLMSampler"}, {"prompt_ignore_length": 1 << 10}, False),
    ],
    indirect=["flavour"],
)
async def test_penalties_count_the_prompt_where_a_sampler_has_them(
    stand_in: ModuleType, open_llm: OpenLlm, arguments: Any, more: dict[str, int], is_obeyed: bool
) -> None:
    prompt = repeating([TOKENS[0], *PROMPT])
    more = {name: min(value, len(prompt)) for name, value in more.items()}
    llm = open_llm(stand_in, **arguments)
    output = await output_of(llm.generate_async(prompt, greedy(stand_in, 1, presence_penalty=2.0, **more)))
    assert (output.token_ids != echoed(prompt, 1)) is is_obeyed


async def test_what_is_refused_at_once(stand_in: ModuleType, open_llm: OpenLlm, tmp_path: Path) -> None:
    llm = open_llm(stand_in, max_num_tokens=16, max_batch_size=4)
    for prompt, params, error, words in (
        (list(range(17)), greedy(stand_in), ValueError, "max_num_tokens"),
        ([1], stand_in.SamplingParams(), ValueError, "end_id"),
        ([1], greedy(stand_in, "6"), TypeError, "max_tokens"),
        ([], greedy(stand_in), ValueError, "at least one token"),
    ):
        with pytest.raises(error, match=words):
            llm.generate_async(prompt, params)
    with pytest.raises(ValueError, match="does not exist"):
        import_module("tensorrt_llm.executor").LoRARequest("poet", 1, str(tmp_path / "nowhere"))


async def test_what_is_refused_in_a_response(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, max_seq_len=16)
    guide = import_module("tensorrt_llm.llmapi").GuidedDecodingParams(regex="a")
    too_long = llm.generate_async(list(range(16)), greedy(stand_in))
    for result in (too_long, llm.generate_async([1], greedy(stand_in, guided_decoding=guide))):
        with pytest.raises(import_module("tensorrt_llm.executor").RequestError):
            await finished(result)
        assert not result.finished
    assert (await output_of(llm.generate_async(list(range(10)), greedy(stand_in, 100)))).length == 6


async def test_text_comes_from_the_tokenizer(stand_in: ModuleType, tmp_path: Path) -> None:
    with stand_in.LLM(make_checkpoint(tmp_path / "with", with_tokenizer=True)) as llm:
        result = llm.generate_async("Hello", stand_in.SamplingParams(max_tokens=4, ignore_eos=True), streaming=True)
        text = "".join(await all_of(result, lambda step: step.outputs[0].text_diff))
        assert (result.prompt, result.prompt_token_ids) == ("Hello", llm.tokenizer.encode("Hello"))
        assert result.outputs[0].text == text == llm.tokenizer.decode(result.outputs[0].token_ids)


async def test_statistics(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, enable_iter_perf_stats=True, kv_cache_config={"max_tokens": 320})
    assert await all_of(llm.get_stats_async(timeout=0.01)) == []
    await finished(llm.generate_async([1, 2, 3], greedy(stand_in)))
    stats = await all_of(llm.get_stats_async(timeout=0.1))
    assert [each["iter"] for each in stats] == list(range(1, 7))
    assert stats[0]["inflightBatchingStats"]["numCtxTokens"] == 3
    assert stats[1]["inflightBatchingStats"]["numGenRequests"] == 1
    assert (stats[0]["kvCacheStats"]["maxNumBlocks"], stats[-1]["kvCacheStats"]["usedNumBlocks"]) == (10, 0)
    assert await all_of(llm.get_stats_async(timeout=5)) == []  # it has ended, until another request comes
    silent = open_llm(stand_in)
    await finished(silent.generate_async([1, 2, 3], greedy(stand_in)))
    assert await all_of(silent.get_stats_async(timeout=0.05)) == []


@pytest.mark.parametrize("fault", ["stats_empty", "stats_null", "stats_raise"])
async def test_faulty_statistics(import_stand_in: ImportStandIn, open_llm: OpenLlm, fault: str) -> None:
    package = import_stand_in(STAND_IN_FAULT=fault)
    llm = open_llm(package, enable_iter_perf_stats=True)
    await finished(llm.generate_async([1], greedy(package)))
    if fault == "stats_raise":
        with pytest.raises(RuntimeError):
            llm.get_stats_async()
    else:
        told = await all_of(llm.get_stats_async(timeout=0.05), lambda each: each["kvCacheStats"])
        assert set(told) == ({None} if fault == "stats_null" else set())


async def test_events_of_the_cache(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, kv_cache_config={"event_buffer_max_size": 64, "max_tokens": 320})
    await finished(llm.generate_async(list(range(70)), greedy(stand_in)))
    events = await all_of(llm.get_kv_cache_events_async(timeout=0.1), lambda each: each["data"])
    assert [each["type"] for each in events] == ["created", "stored", "stored"]
    _, prompt, rest = events
    assert (prompt["parent_hash"], len(prompt["blocks"])) == (None, 2)
    assert rest["parent_hash"] == prompt["blocks"][1]["block_hash"]
    assert [token["token_id"] for token in prompt["blocks"][1]["tokens"]] == list(range(32, 64))
    assert [len(block["tokens"]) for block in rest["blocks"]] == [11]  # the last token is never in the cache


async def test_a_hang_comes_once(import_stand_in: ImportStandIn, open_llm: OpenLlm, tmp_path: Path) -> None:
    package = import_stand_in(STAND_IN_FAULT="hang_after=3", STAND_IN_FAULT_ONCE=str(tmp_path / "once"))
    result = open_llm(package).generate_async([1], greedy(package), streaming=True)
    await hangs(result)
    result.abort()
    await hangs(result)
    assert len(result.outputs[0].token_ids) == 3
    assert (await output_of(open_llm(package).generate_async([1], greedy(package)))).length == 6


def ranks_of(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if any("stand-in-rank" in part for part in each.cmdline())]


@pytest.mark.parametrize(
    ("flavour", "death"), [("1.2.1", ""), ("1.2.1", "error"), ("1.3.0", "error")], indirect=["flavour"]
)
async def test_a_rank_that_dies_ends_all_requests_but_those_that_1_2_leaves_waiting(
    import_stand_in: ImportStandIn, open_llm: OpenLlm, flavour: str, death: str
) -> None:
    package = import_stand_in(STAND_IN_STEP_MS="5", **({"STAND_IN_RANK_DEATH": death} if death else {}))
    llm = open_llm(package, tensor_parallel_size=2)
    result = llm.generate_async([1], greedy(package, 900), streaming=True)
    await anext(result)
    ranks = ranks_of(os.getpid())
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    if death == "error":
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            await finished(result)
    else:
        async with asyncio.timeout(PATIENCE_S):
            while not llm._executor.mpi_futures[0].done():
                await asyncio.sleep(0.01)
        assert not llm._executor.is_shutdown() and not result.finished
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        llm.generate_async([1], greedy(package))
    assert flavour == "1.2.1" or not llm._check_health()


@pytest.mark.parametrize(("faults", "code"), [("rank_dies_after=2", 1), ("exit_after=2", 70)])
def test_a_process_that_ends(flavour: str, checkpoint: Path, faults: str, code: int, engine_environment: Any) -> None:
    engine_environment(STAND_IN_FAULT=faults, STAND_IN_RANK_DEATH="exit")
    program = (
        "import sys, tensorrt_llm as t\n"
        "llm = t.LLM(sys.argv[1], skip_tokenizer_init=True, tensor_parallel_size=2)\n"
        "llm.generate([1], t.SamplingParams(end_id=-1))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(checkpoint)], timeout=60, capture_output=True)
    assert done.returncode == code, done.stderr.decode()


async def test_a_rank_that_dies_may_leave_all_hanging(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    package = import_stand_in(STAND_IN_FAULT="rank_dies_after=2", STAND_IN_RANK_DEATH="hang")
    result = open_llm(package, tensor_parallel_size=2).generate_async([1], greedy(package), streaming=True)
    await hangs(result)
    assert len(result.outputs[0].token_ids) == 2


@pytest.mark.parametrize("missing", ["", "_check_health,cached_tokens"])
def test_attributes_that_not_every_version_has(import_stand_in: ImportStandIn, open_llm: OpenLlm, missing: str) -> None:
    package = import_stand_in(STAND_IN_WITHOUT=missing)
    llm = open_llm(package)
    assert hasattr(llm, "_check_health") == (not missing)
    assert missing or llm._check_health()
    assert hasattr(llm.generate_async([1], greedy(package)), "cached_tokens") == (not missing)


def test_an_unknown_fault_is_an_error(import_stand_in: ImportStandIn) -> None:
    with pytest.raises(ValueError, match="hang_later"):
        import_stand_in(STAND_IN_FAULT="hang_later=3")


def test_after_a_shutdown_nothing_goes(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, tensor_parallel_size=2)
    llm.shutdown()
    assert ranks_of(os.getpid()) == []
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async([1], greedy(stand_in))


@pytest.mark.parametrize("flavour", ["1.2.1"], indirect=True)
async def test_a_compiled_engine(stand_in: ModuleType, compiled_engine: Path) -> None:
    with pytest.raises(ValueError, match="PyTorch backend cannot load"):
        stand_in.LLM(compiled_engine, skip_tokenizer_init=True)
    engine_class = import_module("tensorrt_llm._tensorrt_engine").LLM
    with engine_class(compiled_engine, skip_tokenizer_init=True, max_batch_size=64) as llm:
        output = await output_of(llm.generate_async(PROMPT, greedy(stand_in, end_id=TOKENS[2])))
        assert output.token_ids == TOKENS[:2]  # the C++ decoder leaves the end token out
        with pytest.raises(ValueError, match="max_seq_len"):
            llm.generate_async([1], greedy(stand_in, 768))
        assert await all_of(llm.get_stats_async(timeout=0.1), lambda each: each["iter"]) == [1, 2, 3]


async def test_chunked_prefill(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, max_num_tokens=64, enable_chunked_prefill=True, enable_iter_perf_stats=True)
    output = await output_of(llm.generate_async(list(range(150)), greedy(stand_in)))
    stats = await all_of(llm.get_stats_async(timeout=0.1), lambda each: each["inflightBatchingStats"])
    assert [each["numCtxTokens"] for each in stats[:3]] == [64, 64, 22]
    assert output.token_ids == echoed(list(range(150)), 6)


async def test_paused_requests_are_computed_again(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(
        stand_in,
        kv_cache_config={"max_tokens": 4 * 32, "enable_block_reuse": False},
        scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
        enable_iter_perf_stats=True,
    )
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    results = [llm.generate_async(prompt, greedy(stand_in, 60), streaming=True) for prompt in prompts]
    assert [(await output_of(result)).token_ids for result in results] == [echoed(prompt, 60) for prompt in prompts]
    stats = await all_of(llm.get_stats_async(timeout=0.1), lambda each: each["inflightBatchingStats"])
    assert sum(each["numPausedRequests"] for each in stats) > 0
