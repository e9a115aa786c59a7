"""v2 inputs that only an engine with adapters, beams and all sampling fields supports."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.configuration import default_llm_config
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.sampling import SamplingDefaults
from sluice.pipelines.text.tokenizer import Tokenizer
from tests.engine.capable import CapableEngine
from tests.engine.in_process_client import InProcessEngineClient
from tests.pipelines.llm.calls import ask
from tests.pipelines.llm.stepped_runner import SteppedRunner

PROMPT = "Hello"


@pytest.fixture
async def capable_engine(runner: SteppedRunner, rill_path: Path) -> AsyncIterator[CapableEngine]:
    client = CapableEngine(EngineConfig(model_path=str(rill_path)), runner)
    await client.start()
    client.adapters["french"] = "/loras/french"
    yield client
    await client.stop()


@pytest.fixture
def capable(capable_engine: CapableEngine, rill: Tokenizer) -> LlmModel:
    text = LlmText("echo", rill, capable_engine, SamplingDefaults(), created=1)
    return LlmModel(default_llm_config("echo"), text, capable_engine)


@pytest.mark.parametrize(
    ("fields", "parameters", "adapter"),
    [
        ({}, {}, ""),
        ({"lora_task_id": 0}, {"lora_name": ""}, ""),
        ({"lora_task_id": 2}, {}, "polite"),
        ({}, {"lora_name": "french"}, "french"),
        ({"lora_task_id": 1}, {"lora_name": "french"}, "french"),
        ({}, {"sampling_config": '{"lora_name": "polite"}'}, "polite"),
        ({}, {"lora_name": "french", "lora_id": 7, "lora_path": "/loras/french/", "lora_ckpt_source": "hf"}, "french"),
        ({}, {"lora_id": 0, "lora_path": ""}, ""),
    ],
)
async def test_an_adapter_by_its_name_or_place(
    capable: LlmModel, capable_engine: CapableEngine, fields: dict[str, Any], parameters: dict[str, Any], adapter: str
) -> None:
    await ask(capable, {"text_input": PROMPT} | fields, parameters=parameters)
    assert capable_engine.asked.adapter == adapter


async def test_token_requests_have_adapters_too(capable: LlmModel, capable_engine: CapableEngine) -> None:
    await ask(capable, {"input_ids": [1, 2, 3]}, parameters={"lora_name": "polite"})
    assert capable_engine.asked.adapter == "polite"


REFUSED = [
    ({"lora_name": "rude"}, r"'lora_name' must be an adapter of this model \(1 french, 2 polite\), got 'rude'"),
    ({"lora_task_id": 3}, r"'lora_task_id' must be at most 2, the place of an adapter .*\(1 french, 2 polite\), got 3"),
    (
        {"lora_task_id": 1, "lora_name": "polite"},
        r"'lora_name' \('polite'\) and 'lora_task_id' \(1, 'french'\) name two",
    ),
    ({"lora_id": 7}, "input 'lora_id' goes with lora_name"),
    ({"lora_path": "/loras/french"}, "input 'lora_path' goes with lora_name"),
    (
        {"lora_name": "french", "lora_path": "/elsewhere"},
        "'lora_path' must be the folder from which adapter 'french' was loaded, .* leave it out, got '/elsewhere'",
    ),
    ({"lora_name": "polite", "lora_path": "/loras/polite"}, "'lora_path' must be the folder from which adapter"),
    ({"lora_name": "french", "lora_ckpt_source": "nemo"}, "'lora_ckpt_source' is not supported"),
    ({"lora_name": 5}, "parameter 'lora_name' must be a string, got 5"),
    ({"beam_width": "2"}, "parameter 'beam_width' must be a 32-bit integer"),
    ({"num_return_sequences": 2, "beam_width": 2}, "num_return_sequences must be 1 with a beam_width above 1, got 2"),
    ({"length_penalty": 1.0, "len_penalty": 2.0}, "input 'length_penalty' is given twice"),
]


@pytest.mark.parametrize(("parameters", "words"), REFUSED)
async def test_refuses(
    capable: LlmModel, capable_engine: CapableEngine, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(SluiceError, match=words) as caught:
        await ask(capable, {"text_input": PROMPT}, parameters=parameters)
    assert caught.value.code is ErrorCode.INVALID
    assert capable_engine.requests == []


async def test_sampling_fields_reach_the_engine(capable: LlmModel, capable_engine: CapableEngine) -> None:
    fields = {"text_input": PROMPT, "beam_width": 4, "len_penalty": 1.0}
    parameters = {
        "early_stopping": True,
        "beam_search_diversity_rate": 0.5,
        "no_repeat_ngram_size": 3,
        "runtime_top_p_min": 0.25,
        "top_p_decay": 0.5,
        "runtime_top_p_reset_ids": 9,
    }
    await ask(capable, fields, parameters=parameters)
    sampling = capable_engine.asked.sampling
    assert (sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == (4, 1.0, 1)
    assert type(sampling.early_stopping) is int
    assert (sampling.beam_search_diversity_rate, sampling.no_repeat_ngram_size) == (0.5, 3)
    assert (sampling.top_p_min, sampling.top_p_decay, sampling.top_p_reset_ids) == (0.25, 0.5, 9)


async def test_what_the_sampler_refuses_is_refused_in_the_engine_s_words(
    runner: SteppedRunner, rill: Tokenizer, rill_path: Path
) -> None:
    client = InProcessEngineClient(EngineConfig(model_path=str(rill_path)), runner)
    await client.start()
    reason = "top_p_min cannot be used: TorchSampler ignores it"
    client._info = msgspec.structs.replace(client.info, refused_sampling={"top_p_min": reason})
    text = LlmText("echo", rill, client, SamplingDefaults(), created=1)
    model = LlmModel(default_llm_config("echo"), text, client)
    try:
        for name in ("top_p_min", "runtime_top_p_min"):
            with pytest.raises(SluiceError, match=reason):
                await ask(model, {"text_input": PROMPT}, parameters={name: 0.5})
            await ask(model, {"text_input": PROMPT}, parameters={name: 0.0})
    finally:
        await client.stop()
