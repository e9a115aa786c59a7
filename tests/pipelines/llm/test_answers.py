"""Clients of TensorRT-LLM ask for more than text or tokens: sequences, rows, both faces, metrics, logits, a stop."""

import asyncio
from typing import Any

import numpy as np
import pytest

from sluice.engine.sampling.host_logits import HostLogits
from sluice.errors import SluiceError
from sluice.pipelines.llm.configuration import default_llm_config
from sluice.pipelines.llm.fields import OUTPUTS
from sluice.pipelines.llm.model import LlmModel
from sluice.serving.model import infer_one
from tests.pipelines.llm.calls import VOCAB_SIZE, Record, ask, echo, outputs, request, responses, stream
from tests.pipelines.llm.test_token_inputs import IDS, Make
from tests.waiting import until

PROMPT = "A river runs"
FIELDS = {"input_ids": IDS, "max_tokens": 6, "exclude_input_in_output": True}
METRICS = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
)


@pytest.fixture
def whole(make: Make) -> LlmModel:
    """A model in batches that declares every output there is."""
    config = default_llm_config("echo")
    config.max_batch_size = 4
    declared = {each.name for each in config.output}
    for each in OUTPUTS.values():
        if each.name not in declared:
            data_type = {"BYTES": "STRING"}.get(each.datatype, each.datatype)
            config.output.add(name=each.name, data_type=f"TYPE_{data_type}", dims=each.dims)
    return make(config)


@pytest.mark.parametrize("streams", [False, True])
async def test_all_outputs_that_the_metadata_names_are_answered_together(whole: LlmModel, streams: bool) -> None:
    named = tuple(whole.spec.outputs)
    text = (await ask(whole, {"text_input": PROMPT, "max_tokens": 6}))["text_output"]
    prompt = await whole.text.prepare(PROMPT)
    for fields in ({"text_input": PROMPT}, {"input_ids": prompt, "exclude_input_in_output": True}):
        given: dict[str, Any] = fields | {"max_tokens": 6, "stream": streams}
        parts = await stream(whole, given, requested_outputs=named)
        assert "".join(part["text_output"] for part in parts) == text
        ids = [each for part in parts for each in np.ravel(part["output_ids"]).tolist()]
        assert ids == echo(prompt, 6)
        assert parts[-1]["finish_reason"] == "length"


async def test_both_faces_may_begin_with_the_prompt(whole: LlmModel) -> None:
    prompt = await whole.text.prepare(PROMPT)
    for fields in ({"text_input": PROMPT}, {"input_ids": prompt}):
        given = fields | {"max_tokens": 6, "exclude_input_in_output": False}
        answer = await ask(whole, given, requested_outputs=("text_output", "output_ids"))
        assert answer["text_output"].startswith(PROMPT)
        assert answer["output_ids"] == [*prompt, *echo(prompt, 6)]


async def test_a_row_may_have_several_sequences_of_seeds_one_after_the_other(whole: LlmModel) -> None:
    sampled = FIELDS | {"temperature": 2.0, "seed": 5}
    answers = await stream(whole, sampled | {"num_return_sequences": 3})
    assert len(answers) == 3
    expected = [(await ask(whole, sampled | {"seed": 5 + number}))["output_ids"] for number in range(3)]
    assert {each["sequence_index"]: each["output_ids"] for each in answers} == dict(enumerate(expected))
    assert len({tuple(each) for each in expected}) == 3


async def test_sequences_of_a_stream_say_whose_tokens_they_bring(whole: LlmModel) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 6, "num_return_sequences": 2, "stream": True}
    parts = await stream(whole, fields)
    text = (await ask(whole, {"text_input": PROMPT, "max_tokens": 6}))["text_output"]
    for number in range(2):
        assert "".join(part["text_output"] for part in parts if part["sequence_index"] == number) == text


async def test_several_sequences_need_a_decoupled_model(make: Make) -> None:
    config = default_llm_config("echo")
    config.model_transaction_policy.decoupled = False
    with pytest.raises(SluiceError, match="num_return_sequences must be 1 here"):
        await ask(make(config), FIELDS | {"num_return_sequences": 2})


@pytest.mark.parametrize("streams", [False, True])
async def test_rows_have_responses_of_their_own_where_the_caller_takes_a_stream(whole: LlmModel, streams: bool) -> None:
    prompts = [IDS, [9, 8, 7, 6]]
    fields = {
        "input_ids": np.array(prompts, np.int32),
        "exclude_input_in_output": np.full((2, 1), True),
        "max_tokens": np.full((2, 1), 6, np.int32),
        "stream": np.full((2, 1), streams),
    }
    found: dict[int, list[int]] = {0: [], 1: []}
    async for response in responses(whole, fields, takes_stream=True):
        assert all(tensor.shape[0] == 1 for tensor in response.outputs)
        part = outputs(response)
        found[part["batch_index"]] += np.ravel(part["output_ids"]).tolist()
    assert found == {row: echo(prompt, 6) for row, prompt in enumerate(prompts)}
    if not streams:
        [response] = [await infer_one(whole, request(whole, fields))]
        assert all(tensor.shape[0] == 2 for tensor in response.outputs)


@pytest.mark.parametrize("streams", [False, True])
async def test_metrics_of_a_request(whole: LlmModel, streams: bool) -> None:
    prompt = list(range(40, 60))
    fields = {"input_ids": prompt, "max_tokens": 5, "return_perf_metrics": True, "stream": streams}
    await ask(whole, fields | {"stream": False})
    *_, last = await stream(whole, fields)
    assert set(METRICS) <= last.keys()
    times = [last[name] for name in METRICS[3:7]]
    assert times == sorted(times)
    # 24 of the 25 tokens are in the cache, in blocks of 4; the prompt's last block is computed anew.
    assert [last[name] for name in METRICS[:3]] == [2, 4, 6]
    assert [last[name] for name in METRICS[7:]] == [0.0, 0, 0]
    assert not set(METRICS) & (await ask(whole, FIELDS)).keys()


@pytest.mark.parametrize("streams", [False, True])
async def test_logits_are_those_that_the_tokens_were_chosen_by(whole: LlmModel, streams: bool) -> None:
    flags = {"return_context_logits": True, "return_generation_logits": True, "stream": streams}
    parts = [{each.name: each.array for each in part.outputs} async for part in responses(whole, FIELDS | flags)]
    generation = np.concatenate([part["generation_logits"][0, 0] for part in parts])
    assert generation.shape == (6, VOCAB_SIZE)
    assert HostLogits(generation).argmax(np.arange(6))[0].tolist() == echo(IDS, 6)
    context = parts[-1]["context_logits"]
    assert context.shape == (1, len(IDS), VOCAB_SIZE)
    followers = [echo(IDS[:length], 1)[0] for length in range(1, len(IDS) + 1)]
    assert HostLogits(context[0]).argmax(np.arange(len(IDS)))[0].tolist() == followers


async def test_logits_that_would_be_too_many_are_refused(whole: LlmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.engine.validation.MAX_LOGITS_BYTES", 5 * 4 * VOCAB_SIZE)
    with pytest.raises(SluiceError, match="return_generation_logits takes max_tokens of at most 5 tokens"):
        await ask(whole, FIELDS | {"return_generation_logits": True})
    assert "context_logits" in await ask(whole, FIELDS | {"return_context_logits": True})


async def test_a_stop_ends_a_whole_answer_with_the_tokens_so_far(make: Make, records: list[Record]) -> None:
    config = default_llm_config("echo")
    next(each for each in config.input if each.name == "stop").data_type = "TYPE_BOOL"
    model = make(config)
    stopped = asyncio.ensure_future(infer_one(model, request(model, FIELDS | {"max_tokens": 400}, id="7")))
    await until(lambda: bool(records and records[-1].events))
    assert (await infer_one(model, request(model, {"input_ids": IDS, "stop": True}, id="7"))).is_empty
    answer = outputs(await stopped)
    assert answer["finish_reason"] == "cancelled"
    assert np.ravel(answer["output_ids"]).tolist() == echo(IDS, answer["sequence_length"])
    assert 0 < answer["sequence_length"] < 400


@pytest.mark.parametrize(
    ("backend", "fields", "is_greedy"),
    [
        ("tensorrtllm", {"temperature": 1.9}, True),
        ("tensorrtllm", {"temperature": 1.9, "top_p": 0.0}, True),
        ("tensorrtllm", {"temperature": 1.9, "top_p": 1.0}, False),
        ("tensorrtllm", {"temperature": 1.9, "top_k": 50}, False),
        ("llm", {"temperature": 1.9}, False),
        ("vllm", {"temperature": 1.9}, False),
    ],
)
async def test_a_temperature_alone_is_greedy_where_tensorrt_llm_is(
    make: Make, backend: str, fields: dict[str, Any], is_greedy: bool
) -> None:
    config = default_llm_config("echo")
    config.backend = backend
    found = (await ask(make(config), FIELDS | fields | {"seed": 3}))["output_ids"]
    assert (found == echo(IDS, 6)) == is_greedy
