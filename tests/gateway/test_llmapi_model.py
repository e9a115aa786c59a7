"""NVIDIA's llmapi model, served beside a model with the names of inflight_batcher_llm."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from sluice.cli.repository.command import command
from tests import paths
from tests.gateway.serving_here import HereServer, serving_here

REPOSITORY = paths.DATA / "tensorrt_llm_llmapi"
LLMAPI, TEXT = "tensorrt_llm", "text"
PROMPT = "A river runs north"
NUM_TOKENS = 12
DEFAULT_NUM_TOKENS = 32
"""The longest output of TensorRT-LLM's LLM class where nothing is asked."""
PATIENCE_S = "120"


def write_repository(folder: Path, checkpoint: Path) -> Path:
    """Write the llmapi model, filled in like a user's, and a model of the same checkpoint with all other names."""
    shutil.copytree(REPOSITORY, folder)
    yaml = folder / LLMAPI / "1" / "model.yaml"
    yaml.write_text(Template(yaml.read_text()).substitute(model=checkpoint, decoupled="true"))
    runs = 'parameters { key: "runtime" value { string_value: "openvino" } }\n'
    config = folder / LLMAPI / "config.pbtxt"
    config.write_text(config.read_text() + runs)
    (folder / TEXT / "1").mkdir(parents=True)
    path = f'parameters {{ key: "gpt_model_path" value {{ string_value: "{checkpoint}" }} }}\n'
    (folder / TEXT / "config.pbtxt").write_text(f'backend: "tensorrtllm"\n{runs}{path}')
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HereServer]:
    repository = write_repository(tmp_path_factory.mktemp("llmapi") / "models", checkpoint)
    arguments = ["--model-repository", str(repository), "--engine-heartbeat-timeout-secs", PATIENCE_S, "--dtype", "f32"]
    with serving_here(*arguments) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: HereServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def generate(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    answer = client.post(f"/v2/models/{model}/generate", json={"text_input": PROMPT} | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(client: httpx.Client, **fields: Any) -> str:
    answer = client.post(f"/v2/models/{LLMAPI}/generate", json={"text_input": PROMPT} | fields)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"])


SAME: list[dict[str, Any]] = [
    {"max_tokens": NUM_TOKENS},
    {"max_tokens": NUM_TOKENS, "top_k": 40, "temperature": 0.9, "seed": 7},
    {"max_tokens": NUM_TOKENS, "top_k": 40, "top_p": 0.8, "seed": 8},
    {"max_tokens": NUM_TOKENS, "frequency_penalty": 1.5, "presence_penalty": 1.0},
    {"max_tokens": NUM_TOKENS, "best_of": 1, "temperature": 0.0},
    {"max_tokens": NUM_TOKENS, "exclude_input_from_output": False},
]


@pytest.mark.parametrize("fields", SAME, ids=str)
def test_an_answer_is_that_of_the_other_names(client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = generate(client, LLMAPI, **{f"sampling_param_{name}": value for name, value in fields.items()})
    expected = generate(client, TEXT, **fields)
    assert answer["text_output"]
    assert {key: answer[key] for key in ("text_output", "finish_reason")} == {
        key: expected[key] for key in ("text_output", "finish_reason")
    }


def test_check_finds_nothing_wrong_with_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["check", str(write_repository(tmp_path / "models", checkpoint))]) == 0
    assert "2 models: 2 ok, 0 with notes, 0 would not load" in capsys.readouterr().out


def test_without_a_length_the_llm_class_s_own_applies(client: httpx.Client) -> None:
    expected = generate(client, TEXT, max_tokens=DEFAULT_NUM_TOKENS)["text_output"]
    assert generate(client, LLMAPI)["text_output"] == expected


def test_a_temperature_alone_samples_as_the_llm_class_does(client: httpx.Client) -> None:
    asked = {"sampling_param_temperature": 2.0, "sampling_param_max_tokens": NUM_TOKENS}
    texts = {generate(client, LLMAPI, **asked, sampling_param_seed=seed)["text_output"] for seed in range(1, 6)}
    assert len(texts) > 1


def test_a_top_p_of_0_is_greedy_beside_a_top_k(client: httpx.Client) -> None:
    asked = {"sampling_param_top_p": 0.0, "sampling_param_top_k": 40, "sampling_param_temperature": 2.0}
    answer = generate(client, LLMAPI, **asked, sampling_param_max_tokens=NUM_TOKENS, sampling_param_seed=3)
    assert answer["text_output"] == generate(client, TEXT, max_tokens=NUM_TOKENS)["text_output"]


def test_a_stop_string_ends_the_text_and_is_its_stop_reason(client: httpx.Client) -> None:
    text = generate(client, TEXT, max_tokens=NUM_TOKENS)["text_output"]
    stop = text[len(text) // 2 :][:3]
    asked = {"sampling_param_max_tokens": NUM_TOKENS, "sampling_param_stop": ["never said", stop]}
    answer = generate(client, LLMAPI, **asked, return_stop_reason=True)
    assert (answer["text_output"], answer["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert answer["stop_reason"] == stop


def test_the_stop_reason_of_another_end_is_none(client: httpx.Client) -> None:
    asked = {"sampling_param_max_tokens": 2, "return_stop_reason": True, "return_finish_reason": True}
    answer = generate(client, LLMAPI, **asked)
    assert (answer["stop_reason"], answer["finish_reason"]) == ("None", "length")


def test_the_cumulative_log_probability_is_that_of_the_other_names(client: httpx.Client) -> None:
    answer = generate(client, LLMAPI, sampling_param_max_tokens=NUM_TOKENS, return_cumulative_logprob=True)
    expected = generate(client, TEXT, max_tokens=NUM_TOKENS, return_log_probs=True)["cum_log_probs"]
    assert answer["cumulative_logprob"] == pytest.approx(expected, rel=1e-4)


def test_generate_stream_gives_the_text_in_pieces(client: httpx.Client) -> None:
    asked = {"text_input": PROMPT, "sampling_param_max_tokens": NUM_TOKENS, "streaming": True}
    with client.stream("POST", f"/v2/models/{LLMAPI}/generate_stream", json=asked) as answer:
        events = [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:")]
    assert "".join(each["text_output"] for each in events) == _text(client)
    assert events[-1]["finish_reason"] == "length"


def test_infer_gives_the_text(server: HereServer, client: httpx.Client) -> None:
    triton = httpclient.InferenceServerClient(server.base_url.removeprefix("http://"))
    found = triton.infer(LLMAPI, _inputs(httpclient))
    assert found.as_numpy("text_output").tolist() == [_text(client).encode()]
    triton.close()


def test_model_stream_infer_gives_the_text_in_responses(server: HereServer, client: httpx.Client) -> None:
    found: list[Any] = []
    with grpcclient.InferenceServerClient(server.grpc_address) as triton:
        triton.start_stream(lambda result, error: found.append(error or result))
        triton.async_stream_infer(LLMAPI, _inputs(grpcclient, streaming=True))
        triton.stop_stream()
    assert not isinstance(found[0], Exception), str(found[0])
    assert b"".join(each.as_numpy("text_output")[0] for each in found).decode() == _text(client)


def test_the_cache_s_numbers_are_the_request_s(client: httpx.Client) -> None:
    prompt = " ".join(f"word {number} of a long prompt" for number in range(30))
    asked = {"text_input": prompt, "sampling_param_max_tokens": 2, "sampling_param_return_perf_metrics": True}
    other = {"text_input": prompt, "max_tokens": 2, "return_perf_metrics": True, "return_num_input_tokens": True}
    answers = [(generate(client, LLMAPI, **asked), generate(client, TEXT, **other)) for _ in range(2)]
    block_size = 32
    for answer, expected in answers:
        num_blocks = -(-expected["num_input_tokens"] // block_size)
        reused = expected["num_cached_tokens"] // block_size
        assert answer["kv_cache_reused_block"] == reused
        assert answer["kv_cache_missed_block"] == num_blocks - reused
        assert answer["kv_cache_hit_rate"] == pytest.approx(reused / num_blocks)
    first, second = (answer for answer, _ in answers)
    assert (first["kv_cache_reused_block"], first["kv_cache_hit_rate"]) == (0, 0.0)
    assert second["kv_cache_reused_block"] > 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling_param_best_of": 2}, "input 'sampling_param_best_of' is not supported; leave it out or send 1"),
        (
            {"image_url": ["https://example.com/a.png"]},
            "input 'image_url' is not supported: this model takes text alone",
        ),
        (
            {"sampling_param_logits_post_processor_name": "json_only"},
            "input 'sampling_param_logits_post_processor_name' is not supported",
        ),
        ({"lora_ckpt_source": "nemo"}, "input 'lora_ckpt_source' is not supported"),
        ({"lora_id": 3}, "input 'lora_id' is not supported, as this model was started without LoRA adapters"),
        ({"lora_path": "/loras/a"}, "input 'lora_path' is not supported, as this model was started without LoRA"),
        ({"sampling_param_max_tokens": 0}, "sampling_param_max_tokens must be 1 or more, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_obeyed_is_refused(client: httpx.Client, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(client, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"image_url": [""]},
        {"sampling_param_logits_post_processor_name": ""},
        {"lora_ckpt_source": "hf"},
        {"lora_name": "", "lora_path": ""},
    ],
    ids=lambda value: next(iter(value)),
)
def test_what_asks_for_nothing_is_taken(client: httpx.Client, fields: dict[str, Any]) -> None:
    asked = {"sampling_param_max_tokens": NUM_TOKENS}
    assert generate(client, LLMAPI, **asked, **fields)["text_output"] == _text(client)


def _text(client: httpx.Client) -> str:
    return str(generate(client, TEXT, max_tokens=NUM_TOKENS)["text_output"])


def _inputs(library: Any, **flags: bool) -> list[Any]:
    """Build the tensors of NVIDIA's end_to_end_test.py with --test-llmapi: one row without a batch's dimension."""
    arrays: dict[str, tuple[Any, str]] = {
        "text_input": (np.array([PROMPT.encode()], np.object_), "BYTES"),
        "sampling_param_max_tokens": (np.array([NUM_TOKENS], np.int32), "INT32"),
        **{name: (np.array([value]), "BOOL") for name, value in flags.items()},
    }
    inputs = []
    for name, (array, datatype) in arrays.items():
        inputs.append(library.InferInput(name, array.shape, datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs
