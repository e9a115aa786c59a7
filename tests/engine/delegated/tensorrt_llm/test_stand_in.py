"""The stand-in behaves as TensorRT-LLM is known to."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.engine.fake_runner import echo_next
from tests.stand_ins.model_folders import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.slow

TIMEOUT_S = 20
OpenLlm = Callable[..., Any]
ImportStandIn = Callable[..., ModuleType]


def greedy(package: ModuleType, max_tokens: Any = 6, **values: Any) -> Any:
    return package.SamplingParams(max_tokens=max_tokens, end_id=-1, **values)


def echoed(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(echo_next(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


async def finished(result: Any) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return await result.aresult()


async def test_one_object_is_yielded_and_grows(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in)
    result = llm.generate_async([1, 2, 3], greedy(stand_in), streaming=True)
    seen: list[int] = []
    sizes: list[int] = []

    async with asyncio.timeout(TIMEOUT_S):
        async for step in result:
            assert step is result
            seen += step.outputs[0].token_ids_diff
            sizes.append(len(step.outputs[0].token_ids_diff))
            assert step.outputs[0].token_ids == seen
            assert step.finished == (step.outputs[0].finish_reason is not None)

    assert sizes == [1] * 6
    assert result.outputs[0].token_ids == echoed([1, 2, 3], 6)
    assert (result.outputs[0].finish_reason, result.outputs[0].length) == ("length", 6)
    assert result.prompt_token_ids == [1, 2, 3]
    assert result.context_logits is None and result.prompt is None


async def test_without_streaming_all_comes_at_once(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    result = open_llm(stand_in).generate_async([1, 2, 3], greedy(stand_in))

    async with asyncio.timeout(TIMEOUT_S):
        steps = [len(step.outputs[0].token_ids) async for step in result]

    assert steps == [6]


async def test_a_stream_interval_merges_tokens(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    result = open_llm(stand_in, stream_interval=4).generate_async([1], greedy(stand_in, 10), streaming=True)

    async with asyncio.timeout(TIMEOUT_S):
        pieces = [len(step.outputs[0].token_ids_diff) async for step in result]

    assert pieces == [1, 3, 4, 2]


def test_without_a_loop_it_cannot_be_awaited(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in)
    result = llm.generate_async([1, 2], greedy(stand_in), streaming=True)

    async def wait() -> None:
        await result

    with pytest.raises(AssertionError, match="event loop was not present"):
        asyncio.run(wait())
    assert result.result().outputs[0].token_ids == echoed([1, 2], 6)
    assert llm.generate([3], greedy(stand_in)).outputs[0].token_ids == echoed([3], 6)
    many = llm.generate([[3], [4]], greedy(stand_in))
    assert [each.outputs[0].token_ids for each in many] == [echoed([3], 6), echoed([4], 6)]


async def test_abort_brings_a_last_response(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    package = import_stand_in(STAND_IN_STEP_MS="5")
    result = open_llm(package).generate_async([1, 2], greedy(package, 900), streaming=True)

    async with asyncio.timeout(TIMEOUT_S), aclosing(aiter_of(result)) as steps:
        async for step in steps:
            if len(step.outputs[0].token_ids) == 3:
                result.abort()

    assert result.aborted() and result.finished
    assert result.outputs[0].finish_reason == "cancelled"
    assert 3 <= len(result.outputs[0].token_ids) < 900


async def aiter_of(result: Any) -> Any:
    async for step in result:
        yield step


async def test_a_waiting_request_can_be_aborted(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    package = import_stand_in(STAND_IN_STEP_MS="5")
    llm = open_llm(package, max_batch_size=1)
    first = llm.generate_async([1], greedy(package, 900), streaming=True)
    second = llm.generate_async([2], greedy(package, 900), streaming=True)

    second.abort()

    assert (await finished(second)).outputs[0].finish_reason == "cancelled"
    assert second.outputs[0].token_ids == []
    first.abort()
    await finished(first)


async def test_an_end_token_stops(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    end = echoed([1, 2], 3)[2]
    for told, count in (("auto", 3), ("in", 3), ("out", 2)):
        package = import_stand_in(STAND_IN_END_TOKEN=told)
        result = open_llm(package).generate_async([1, 2], package.SamplingParams(end_id=end))
        output = (await finished(result)).outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert output.token_ids == echoed([1, 2], count)


async def test_ignore_eos(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    end = echoed([1, 2], 3)[2]
    params = stand_in.SamplingParams(end_id=end, ignore_eos=True, max_tokens=5)

    assert (await finished(open_llm(stand_in).generate_async([1, 2], params))).outputs[0].finish_reason == "length"


@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_token_is_cut_off_unless_it_is_wanted(
    stand_in: ModuleType, open_llm: OpenLlm, is_included: bool
) -> None:
    tokens = echoed([1, 2], 3)
    params = greedy(stand_in, stop_token_ids=[tokens[2]], include_stop_str_in_output=is_included)

    output = (await finished(open_llm(stand_in).generate_async([1, 2], params, streaming=True))).outputs[0]

    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[2])
    assert output.token_ids == (tokens if is_included else tokens[:2])


async def test_the_length_goes_before_a_stop_token(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    params = greedy(stand_in, 3, stop_token_ids=[echoed([1, 2], 3)[2]])

    output = (await finished(open_llm(stand_in).generate_async([1, 2], params))).outputs[0]

    assert (output.finish_reason, len(output.token_ids)) == ("length", 3)


async def test_logprobs(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    params = greedy(stand_in, 3, logprobs=2, prompt_logprobs=1)

    result = await finished(open_llm(stand_in).generate_async([1, 2], params))
    output = result.outputs[0]

    assert len(output.logprobs) == 3 and len(output.prompt_logprobs) == 2
    for token, told in zip(output.token_ids, output.logprobs, strict=True):
        assert told[token].rank == 1 and len(told) == 2
        assert all(told[token].logprob > other.logprob for key, other in told.items() if key != token)
    assert output.cumulative_logprob == pytest.approx(
        sum(told[t].logprob for t, told in zip(output.token_ids, output.logprobs, strict=True))
    )


async def test_zero_logprobs_are_the_sampled_tokens_own(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    output = (await finished(open_llm(stand_in).generate_async([1], greedy(stand_in, 2, logprobs=0)))).outputs[0]

    assert [list(told) for told in output.logprobs] == [[token] for token in output.token_ids]


async def test_performance_of_a_request(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    output = (
        await finished(open_llm(stand_in).generate_async([1], greedy(stand_in, return_perf_metrics=True)))
    ).outputs[0]

    times = output.request_perf_metrics.timing_metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.last_token_time


async def test_a_prefix_is_reused_under_its_salt(stand_in: ModuleType, open_llm: OpenLlm, flavour: str) -> None:
    llm = open_llm(stand_in)
    prompt = list(range(100))
    await finished(llm.generate_async(prompt, greedy(stand_in), cache_salt="a"))

    again = await finished(llm.generate_async(prompt, greedy(stand_in), cache_salt="a"))
    other = await finished(llm.generate_async(prompt, greedy(stand_in), cache_salt="b"))

    assert again.outputs[0].token_ids == other.outputs[0].token_ids == echoed(prompt, 6)
    if flavour == "1.3.0":
        assert (again.cached_tokens, other.cached_tokens) == (96, 0)
    else:
        assert not hasattr(again, "cached_tokens")


@pytest.mark.parametrize(
    ("flavour", "is_taken"), [("1.2.1", False), ("1.3.0rc5", False), ("1.3.0", True)], indirect=["flavour"]
)
async def test_a_request_narrower_than_the_beams(stand_in: ModuleType, open_llm: OpenLlm, is_taken: bool) -> None:
    result = open_llm(stand_in, max_beam_width=3).generate_async([1, 2], greedy(stand_in))
    if is_taken:
        assert (await finished(result)).outputs[0].token_ids == echoed([1, 2], 6)
    else:
        with pytest.raises(
            import_module("tensorrt_llm.executor").RequestError, match="is not equal to max_beam_width 3"
        ):
            await finished(result)


async def test_the_torch_sampler_ignored_penalties_once(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    prompt = [echoed([1, 2], 1)[0], 1, 2]
    while echoed(prompt, 1)[0] not in prompt:
        prompt.append(echoed(prompt, 1)[0])
    repeated = echoed(prompt, 1)
    for version, is_obeyed in (("1.3.0rc5", False), ("1.3.0", True)):
        package = import_stand_in(STAND_IN_VERSION=version)
        result = open_llm(package).generate_async(prompt, greedy(package, 1, presence_penalty=2.0))
        assert ((await finished(result)).outputs[0].token_ids != repeated) is is_obeyed


@pytest.mark.parametrize(("sampler", "count"), [("TRTLLMSampler", 1), ("TorchSampler", 3)])
async def test_log_probabilities_of_each_sampler_of_1_2(
    import_stand_in: ImportStandIn, open_llm: OpenLlm, sampler: str, count: int
) -> None:
    package = import_stand_in(STAND_IN_VERSION="1.2.1")
    llm = open_llm(package, sampler_type=sampler)
    output = (await finished(llm.generate_async([1], greedy(package, 2, logprobs=3)))).outputs[0]
    assert [len(told) for told in output.logprobs] == [count, count]


async def test_beams(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, max_beam_width=3)
    params = greedy(stand_in, use_beam_search=True, best_of=3, n=2)

    outputs = (await finished(llm.generate_async([1, 2], params))).outputs

    assert [output.index for output in outputs] == [0, 1]
    assert outputs[0].token_ids == echoed([1, 2], 6) != outputs[1].token_ids
    assert outputs[0].cumulative_logprob is not None
    with pytest.raises(ValueError, match="max_beam_width"):
        llm.generate_async([1], greedy(stand_in, use_beam_search=True, best_of=4, n=4))


async def test_adapters(stand_in: ModuleType, open_llm: OpenLlm, tmp_path: Path) -> None:
    request = import_module("tensorrt_llm.executor").LoRARequest("poet", 1, str(tmp_path))
    llm = open_llm(stand_in, enable_lora=True)

    adapted = await finished(llm.generate_async([1, 2], greedy(stand_in), lora_request=request))

    assert adapted.outputs[0].token_ids != echoed([1, 2], 6)
    with pytest.raises(ValueError, match="does not exist"):
        import_module("tensorrt_llm.executor").LoRARequest("poet", 1, str(tmp_path / "nowhere"))


async def test_a_script_and_what_is_recorded(import_stand_in: ImportStandIn, open_llm: OpenLlm, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"1,2": [7, 8, 9]}))
    record = tmp_path / "record.jsonl"
    package = import_stand_in(STAND_IN_SCRIPT=str(script), STAND_IN_RECORD=str(record))
    guide = import_module("tensorrt_llm.llmapi").GuidedDecodingParams(regex="[a-z]+")
    llm = open_llm(package, guided_decoding_backend="xgrammar")
    params = package.SamplingParams(end_id=2, guided_decoding=guide)

    whole = await finished(llm.generate_async([1, 2], params))
    rest = await finished(llm.generate_async([1, 2, 7], params))

    assert whole.outputs[0].token_ids == [7, 8, 9, 2]
    assert rest.outputs[0].token_ids == [8, 9, 2]
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert lines[0]["arguments"]["guided_decoding_backend"] == "xgrammar"
    assert lines[1]["sampling_params"]["guided_decoding"]["regex"] == "[a-z]+"
    assert lines[2]["prompt_token_ids"] == [1, 2, 7]


async def test_penalties_count_the_prompt_unless_it_is_ignored(
    stand_in: ModuleType, open_llm: OpenLlm, flavour: str
) -> None:
    llm = open_llm(stand_in, **({"sampler_type": "TRTLLMSampler"} if flavour == "1.2.1" else {}))
    likeliest = echoed([1, 2], 1)[0]
    prompt = [likeliest, 1, 2]
    wanted = echoed(prompt, 1)[0]
    with_it = [wanted, *prompt]
    while echoed(with_it, 1)[0] not in with_it:
        with_it.append(echoed(with_it, 1)[0])
    repeated = echoed(with_it, 1)[0]

    counted = await finished(llm.generate_async(with_it, greedy(stand_in, 1, presence_penalty=2.0)))
    ignored = await finished(
        llm.generate_async(with_it, greedy(stand_in, 1, presence_penalty=2.0, prompt_ignore_length=len(with_it)))
    )

    assert counted.outputs[0].token_ids != [repeated]
    assert ignored.outputs[0].token_ids == [repeated]


async def test_what_is_refused_at_once(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, max_num_tokens=16, max_batch_size=4)

    with pytest.raises(ValueError, match="max_num_tokens"):
        llm.generate_async(list(range(17)), greedy(stand_in))
    with pytest.raises(ValueError, match="end_id"):
        llm.generate_async([1], stand_in.SamplingParams())
    with pytest.raises(TypeError, match="max_tokens"):
        llm.generate_async([1], greedy(stand_in, "6"))
    with pytest.raises(ValueError, match="at least one token"):
        llm.generate_async([], greedy(stand_in))


async def test_what_is_refused_in_a_response(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    request_error = import_module("tensorrt_llm.executor").RequestError
    llm = open_llm(stand_in, max_seq_len=16)
    long = llm.generate_async(list(range(16)), greedy(stand_in))
    unguided = llm.generate_async(
        [1], greedy(stand_in, guided_decoding=import_module("tensorrt_llm.llmapi").GuidedDecodingParams(regex="a"))
    )

    for result in (long, unguided):
        with pytest.raises(request_error):
            await finished(result)
        assert not result.finished
    assert (await finished(llm.generate_async(list(range(10)), greedy(stand_in, 100)))).outputs[0].length == 6


async def test_text_comes_from_the_tokenizer(stand_in: ModuleType, tmp_path: Path) -> None:
    llm = stand_in.LLM(make_checkpoint(tmp_path / "with", with_tokenizer=True))
    try:
        result = llm.generate_async("Hello", stand_in.SamplingParams(max_tokens=4, ignore_eos=True), streaming=True)
        text = ""
        async with asyncio.timeout(TIMEOUT_S):
            async for step in result:
                text += step.outputs[0].text_diff
        assert (result.prompt, result.prompt_token_ids) == ("Hello", llm.tokenizer.encode("Hello"))
        assert result.outputs[0].text == text == llm.tokenizer.decode(result.outputs[0].token_ids)
    finally:
        llm.shutdown()


async def told(iterations: Any) -> list[dict[str, Any]]:
    async with asyncio.timeout(TIMEOUT_S):
        return [each async for each in iterations]


async def test_statistics(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, enable_iter_perf_stats=True, kv_cache_config={"max_tokens": 320})
    assert await told(llm.get_stats_async(timeout=0.01)) == []

    await finished(llm.generate_async([1, 2, 3], greedy(stand_in)))
    stats = await told(llm.get_stats_async(timeout=0.1))

    assert [each["iter"] for each in stats] == list(range(1, 7))
    assert stats[0]["inflightBatchingStats"]["numCtxTokens"] == 3
    assert stats[1]["inflightBatchingStats"]["numGenRequests"] == 1
    assert stats[0]["kvCacheStats"]["maxNumBlocks"] == 10
    assert stats[-1]["kvCacheStats"]["usedNumBlocks"] == 0
    assert await told(llm.get_stats_async(timeout=5)) == []  # it has ended, until another request comes


async def test_no_statistics_unless_they_are_asked_for(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in)
    await finished(llm.generate_async([1, 2, 3], greedy(stand_in)))

    assert await told(llm.get_stats_async(timeout=0.05)) == []


async def test_events_of_the_cache(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, kv_cache_config={"event_buffer_max_size": 64, "max_tokens": 320})
    await finished(llm.generate_async(list(range(70)), greedy(stand_in)))

    events = await told(llm.get_kv_cache_events_async(timeout=0.1))

    assert [each["data"]["type"] for each in events] == ["created", "stored", "stored"]
    first, second = (each["data"] for each in events[1:])
    assert second["parent_hash"] == first["blocks"][0]["block_hash"]
    assert [token["token_id"] for token in first["blocks"][0]["tokens"]] == list(range(32))


@pytest.mark.parametrize("fault", ["stats_empty", "stats_null", "stats_raise"])
async def test_faulty_statistics(import_stand_in: ImportStandIn, open_llm: OpenLlm, fault: str) -> None:
    package = import_stand_in(STAND_IN_FAULT=fault)
    llm = open_llm(package, enable_iter_perf_stats=True)
    await finished(llm.generate_async([1], greedy(package)))

    if fault == "stats_raise":
        with pytest.raises(RuntimeError):
            llm.get_stats_async()
    else:
        stats = await told(llm.get_stats_async(timeout=0.05))
        assert {each["kvCacheStats"] for each in stats} == ({None} if fault == "stats_null" else set())


async def test_one_request_fails_and_the_others_go_on(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    package = import_stand_in(STAND_IN_FAULT="error_on_token=13")
    llm = open_llm(package)
    bad = llm.generate_async([12, 13], greedy(package), streaming=True)
    good = llm.generate_async([1, 2], greedy(package), streaming=True)

    with pytest.raises(import_module("tensorrt_llm.executor").RequestError, match="13"):
        await finished(bad)
    assert (await finished(good)).outputs[0].token_ids == echoed([1, 2], 6)


async def test_a_hang(import_stand_in: ImportStandIn, open_llm: OpenLlm, tmp_path: Path) -> None:
    package = import_stand_in(STAND_IN_FAULT="hang_after=3", STAND_IN_FAULT_ONCE=str(tmp_path / "once"))
    llm = open_llm(package)
    result = llm.generate_async([1], greedy(package), streaming=True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await result.aresult()
    result.abort()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await result.aresult()
    assert len(result.outputs[0].token_ids) == 3
    again = open_llm(package).generate_async([1], greedy(package))
    assert (await finished(again)).outputs[0].length == 6


def ranks_of(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if any("stand-in-rank" in part for part in each.cmdline())]


async def test_a_rank_that_dies_is_known_to_the_front_and_leaves_requests_of_1_2_waiting(
    import_stand_in: ImportStandIn, open_llm: OpenLlm
) -> None:
    package = import_stand_in(STAND_IN_VERSION="1.2.1", STAND_IN_STEP_MS="5")
    llm = open_llm(package, tensor_parallel_size=2)
    result = llm.generate_async([1], greedy(package, 900), streaming=True)
    await anext(result)
    os.kill(ranks_of(os.getpid())[1].pid, signal.SIGKILL)

    async with asyncio.timeout(TIMEOUT_S):
        while not llm._executor.mpi_futures[0].done():
            await asyncio.sleep(0.01)
    assert not llm._executor.is_shutdown() and not result.finished
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        llm.generate_async([1], greedy(package))


async def test_a_rank_that_dies_ends_all_requests(
    import_stand_in: ImportStandIn, open_llm: OpenLlm, flavour: str
) -> None:
    package = import_stand_in(STAND_IN_STEP_MS="5", STAND_IN_RANK_DEATH="error")
    llm = open_llm(package, tensor_parallel_size=2)
    result = llm.generate_async([1], greedy(package, 900), streaming=True)
    await anext(result)
    ranks = ranks_of(os.getpid())
    assert len(ranks) == 2

    os.kill(ranks[1].pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        await finished(result)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        llm.generate_async([1], greedy(package))
    if flavour == "1.3.0":
        assert not llm._check_health()


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

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await result.aresult()
    assert len(result.outputs[0].token_ids) == 2 and not result.finished


@pytest.mark.parametrize("missing", ["", "_check_health,cached_tokens"])
async def test_attributes_that_not_every_version_has(
    import_stand_in: ImportStandIn, open_llm: OpenLlm, missing: str
) -> None:
    package = import_stand_in(STAND_IN_WITHOUT=missing)
    llm = open_llm(package)

    assert hasattr(llm, "_check_health") == (not missing)
    assert hasattr(llm.generate_async([1], greedy(package)), "cached_tokens") == (not missing)


def test_an_llm_that_is_not_well(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    assert open_llm(import_stand_in(STAND_IN_WITHOUT=""))._check_health()
    assert not open_llm(import_stand_in(STAND_IN_FAULT="unhealthy"))._check_health()


def test_a_load_that_fails(import_stand_in: ImportStandIn, open_llm: OpenLlm) -> None:
    package = import_stand_in(STAND_IN_FAULT="load_error=no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        open_llm(package)


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
    engine_class = import_module("tensorrt_llm._tensorrt_engine").LLM
    with pytest.raises(ValueError, match="PyTorch backend cannot load"):
        stand_in.LLM(compiled_engine, skip_tokenizer_init=True)

    with engine_class(compiled_engine, skip_tokenizer_init=True, max_batch_size=64) as llm:
        end = echoed([1, 2], 3)[2]
        output = (await finished(llm.generate_async([1, 2], stand_in.SamplingParams(end_id=end)))).outputs[0]
        assert output.token_ids == echoed([1, 2], 2)  # the C++ decoder leaves the end token out
        with pytest.raises(ValueError, match="max_seq_len"):
            llm.generate_async([1], greedy(stand_in, 768))
        assert [each["iter"] for each in await told(llm.get_stats_async(timeout=0.1))] == [1, 2, 3]


async def test_chunked_prefill(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(stand_in, max_num_tokens=64, enable_chunked_prefill=True, enable_iter_perf_stats=True)

    result = await finished(llm.generate_async(list(range(150)), greedy(stand_in)))

    stats = await told(llm.get_stats_async(timeout=0.1))
    assert [each["inflightBatchingStats"]["numCtxTokens"] for each in stats[:3]] == [64, 64, 22]
    assert result.outputs[0].token_ids == echoed(list(range(150)), 6)


async def test_paused_requests_are_computed_again(stand_in: ModuleType, open_llm: OpenLlm) -> None:
    llm = open_llm(
        stand_in,
        kv_cache_config={"max_tokens": 4 * 32, "enable_block_reuse": False},
        scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
        enable_iter_perf_stats=True,
    )
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    results = [llm.generate_async(prompt, greedy(stand_in, 60), streaming=True) for prompt in prompts]

    outputs = [(await finished(result)).outputs[0].token_ids for result in results]

    assert outputs == [echoed(prompt, 60) for prompt in prompts]
    stats = await told(llm.get_stats_async(timeout=0.1))
    assert sum(each["inflightBatchingStats"]["numPausedRequests"] for each in stats) > 0
