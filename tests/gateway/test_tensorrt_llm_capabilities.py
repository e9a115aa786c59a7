"""Capabilities that only TensorRT-LLM has, through both protocols: adapters, beams, its statistics."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sluice.engine.config import EngineConfig, Runtime
from sluice.gateway.telemetry.trt_llm import TrtLlmCollector
from sluice.pipelines.text.tokenizer import Tokenizer
from tests.engine.fake_runner import echo_next
from tests.gateway.answering import Answering, answering_stand_in
from tests.stand_ins.model_folders import VOCAB_SIZE, make_adapter, make_checkpoint

VERSION = "1.3.0"
"""1.2 starts with one beam alone."""
ADAPTER_SHIFT = 31
"""Amount that the stand-in adds to each token for each place of an adapter."""
IDS = [11, 12, 13, 14]
NUM_TOKENS = 8
MAX_BEAM_WIDTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return make_checkpoint(folder / "model", with_tokenizer=True)


@pytest.fixture(scope="module")
def theirs(folder: Path, checkpoint: Path) -> Iterator[Answering]:
    adapters = {name: make_adapter(folder / name, seed=seed) for seed, name in enumerate(("french", "polite"))}
    config = EngineConfig(
        model_path=str(checkpoint),
        tokenizer_path=str(checkpoint),
        runtime=Runtime.TENSORRT_LLM,
        lora_modules=adapters,
        runtime_settings={"max_beam_width": str(MAX_BEAM_WIDTH)},
    )
    with answering_stand_in(config, VERSION) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def tokens_of(adapter: int) -> list[int]:
    """Return the answer to IDS by the adapter at this place; 0 for none."""
    ids = list(IDS)
    for _ in range(NUM_TOKENS):
        ids.append((echo_next(ids, VOCAB_SIZE) + adapter * ADAPTER_SHIFT) % VOCAB_SIZE)
    return ids[len(IDS) :]


def complete(theirs: Answering, **fields: Any) -> httpx.Response:
    body = {"model": "rill", "prompt": IDS, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    return theirs.client.post("/v1/completions", json=body)


def generate(theirs: Answering, **fields: Any) -> httpx.Response:
    body = {"input_ids": IDS, "max_tokens": NUM_TOKENS, "exclude_input_in_output": True, **fields}
    return theirs.client.post("/v2/models/rill/generate", json=body)


@pytest.mark.parametrize(("model", "place"), [("rill", 0), ("rill:french", 1), ("rill:polite", 2), ("rill", 0)])
def test_each_adapter_answers_for_itself(theirs: Answering, tokenizer: Tokenizer, model: str, place: int) -> None:
    """Cases run in this order, whatever the cache holds of another's prompt."""
    detokenizer = tokenizer.detokenizer()
    answer = complete(theirs, model=model)
    assert answer.json()["choices"][0]["text"] == detokenizer.feed(tokens_of(place)) + detokenizer.flush()
    assert answer.json()["model"] == model


def test_v2_names_adapters_by_inputs(theirs: Answering) -> None:
    assert generate(theirs, lora_task_id=2).json()["output_ids"] == tokens_of(2)
    assert generate(theirs, lora_name="french").json()["output_ids"] == tokens_of(1)


@pytest.mark.parametrize("fields", [{"use_beam_search": True, "best_of": 2}, {"beam_width": MAX_BEAM_WIDTH}], ids=str)
def test_a_beam_search_is_answered_with_one_beam(theirs: Answering, fields: dict[str, Any]) -> None:
    answer = complete(theirs, **fields, length_penalty=1.0, early_stopping=True)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 1
    assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("width", [MAX_BEAM_WIDTH + 1, 0])
def test_more_beams_than_the_engine_has_are_refused(theirs: Answering, width: int) -> None:
    answer = generate(theirs, beam_width=width)
    assert answer.status_code == 400
    assert answer.json()["error"] == f"beam_width must be between 1 and {MAX_BEAM_WIDTH} (max_beam_width), got {width}"


def test_sampling_fields_are_obeyed(theirs: Answering) -> None:
    fields = {"top_p": 0.5, "top_p_min": 0.1, "top_p_decay": 0.9, "top_p_reset_ids": 5, "no_repeat_ngram_size": 3}
    assert complete(theirs, **fields, temperature=1).status_code == 200
    assert generate(theirs, **fields).status_code == 200


def test_its_own_statistics_are_on_the_page(theirs: Answering) -> None:
    assert complete(theirs).status_code == 200
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TrtLlmCollector(theirs.server.plane.repository.models))
    page = generate_latest(registry).decode()
    for series in (
        'nv_trt_llm_request_metrics{model="rill",request_type="active",version="1"}',
        'nv_trt_llm_runtime_memory_metrics{memory_type="gpu",model="rill",version="1"}',
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="rill",version="1"}',
        'nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="paused_requests",model="rill",version="1"}',
        'nv_trt_llm_general_metrics{general_type="iteration_counter",model="rill",version="1"}',
    ):
        assert series in page
