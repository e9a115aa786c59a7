"""NVIDIA's five-model repository, served around a small checkpoint: by Python stages, and by our own in their place."""

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
from tritonclient.utils import np_to_triton_dtype

from sluice.cli.repository.command import command
from sluice.pipelines.text.tokenizer import Tokenizer
from tests import paths
from tests.server_process import MODEL, ServerProcess, running_server

REPOSITORY = paths.DATA / "tensorrtllm_backend"
STAGES = ("preprocessing", "postprocessing", "tensorrt_llm_bls")
FACES = ("ensemble", "tensorrt_llm_bls")
PROMPTS = [f"A river runs {word}" for word in ("north", "south", "east", "west", "fast", "deep", "dry", "home")]
NUM_TOKENS = 12
NUM_TRIES = 10


def write_repository(folder: Path, checkpoint: Path) -> Path:
    """Fill in the templates like a user: values with a default stay as they are."""
    shutil.copytree(REPOSITORY, folder)
    values = {
        "triton_backend": "tensorrtllm",
        "triton_max_batch_size": "4",
        "max_queue_delay_microseconds": "0",
        "max_queue_size": "0",
        "decoupled_mode": "True",
        "preprocessing_instance_count": "1",
        "postprocessing_instance_count": "1",
        "bls_instance_count": "1",
        "accumulate_tokens": "False",
        "tokenizer_dir": str(checkpoint),
        "engine_dir": str(checkpoint),
        "batching_strategy": "inflight_fused_batching",
        "exclude_input_in_output": "True",
        "logits_datatype": "TYPE_FP32",
        "max_beam_width": "1",
        "max_tokens_in_paged_kv_cache": "2560",
        "max_attention_window_size": "2560",
        "kv_cache_free_gpu_mem_fraction": "0.5",
        "enable_kv_cache_reuse": "False",
        "decoding_mode": "top_k_top_p",
        "num_nodes": "1",
        "normalize_log_probs": "True",
        "enable_chunked_context": "True",
    }
    for config in folder.glob("*/config.pbtxt"):
        config.write_text(Template(config.read_text()).safe_substitute(values))
    return folder


@pytest.fixture(scope="module", params=["python", "native"])
def server(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Serve the five models with the one-model text interface of the same checkpoint beside them."""
    folder = tmp_path_factory.mktemp("tensorrtllm_backend")
    repository = write_repository(folder / "models", checkpoint)
    flags = ["--native-text-stages"] if request.param == "native" else []
    arguments = ["--model-repository", str(repository), "--dtype", "f32", *flags]
    with running_server(checkpoint, folder / "log", *arguments) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def is_native(server: ServerProcess) -> bool:
    return "--native-text-stages" in server.process.args  # type: ignore[operator]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


@pytest.fixture(scope="module")
def prompt(client: httpx.Client) -> str:
    """A prompt whose answer's tokens are whole characters, as an ensemble decodes each alone."""
    for prompt in PROMPTS:
        text = generate(client, MODEL, text_input=prompt)
        if text and text.isascii():
            return prompt
    raise AssertionError("no prompt has an answer in ASCII")


def generate(client: httpx.Client, model: str, **fields: Any) -> str:
    asked = {"text_input": PROMPTS[0], "max_tokens": NUM_TOKENS} | fields
    answer = client.post(f"/v2/models/{model}/generate", json=asked)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["text_output"]
    return text


def streamed(client: httpx.Client, model: str, **fields: Any) -> list[str]:
    asked = {"text_input": PROMPTS[0], "max_tokens": NUM_TOKENS, "stream": True} | fields
    with client.stream("POST", f"/v2/models/{model}/generate_stream", json=asked) as answer:
        return [json.loads(line[5:])["text_output"] for line in answer.iter_lines() if line.startswith("data:")]


def stop_word(tokenizer: Tokenizer, text: str) -> str:
    """A word of the text that is one token wherever it stands, and is not the first."""
    ids = tokenizer.encode_words(text, "text")
    for token_id in ids[2:]:
        word = tokenizer.decode([token_id], skip_special_tokens=True)
        if word.strip() and tokenizer.encode_words(word, "text") == [token_id] and text.find(word) > 0:
            return word
    raise AssertionError(f"no word of {text!r} is a token")


def test_check_finds_nothing_wrong_with_the_five(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["check", str(write_repository(tmp_path / "models", checkpoint))]) == 0
    assert "5 models: " in (told := capsys.readouterr().out)
    assert "without effect: max_attention_window_size: " in told


def test_all_five_are_served(server: ServerProcess, client: httpx.Client, is_native: bool) -> None:
    backends = {name: client.get(f"/v2/models/{name}/config").json()["backend"] for name in STAGES}
    assert backends == {name: name if is_native else "python" for name in STAGES}
    for name in STAGES:
        assert (f"model '{name}': served by the native text stage" in server.log) == is_native
    metadata = client.get("/v2/models/ensemble").json()
    assert [each["name"] for each in metadata["outputs"]].count("kv_cache_alloc_total_blocks") == 1


@pytest.mark.parametrize("face", FACES)
def test_text_is_that_of_the_text_face(client: httpx.Client, face: str) -> None:
    for prompt in PROMPTS[:3]:
        assert generate(client, face, text_input=prompt) == generate(client, MODEL, text_input=prompt)


@pytest.mark.parametrize("face", FACES)
def test_streams(client: httpx.Client, face: str, prompt: str) -> None:
    assert "".join(streamed(client, face, text_input=prompt)) == generate(client, MODEL, text_input=prompt)
    # What nobody has fetched yet comes in one piece, and a busy machine's stages may fetch late.
    assert any(len(streamed(client, face, max_tokens=400)) > 1 for _ in range(NUM_TRIES))


def test_characters_of_several_tokens_come_whole(client: httpx.Client, is_native: bool) -> None:
    if not is_native:
        pytest.skip("a Python stage sees each response's tokens alone")
    expected = generate(client, MODEL, max_tokens=400)
    assert not expected.isascii()
    assert "".join(streamed(client, "tensorrt_llm_bls", max_tokens=400)) == expected


@pytest.mark.parametrize("face", FACES)
def test_sampling(client: httpx.Client, face: str) -> None:
    asked = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7}
    assert generate(client, face, **asked) == generate(client, MODEL, **asked) != generate(client, MODEL)


@pytest.mark.parametrize("face", FACES)
def test_a_stop_word_ends_the_text_and_is_its_end(
    client: httpx.Client, face: str, prompt: str, tokenizer: Tokenizer
) -> None:
    word = stop_word(tokenizer, generate(client, MODEL, text_input=prompt))
    expected = generate(client, MODEL, text_input=prompt, stop_words=[word]) + word
    assert generate(client, face, text_input=prompt, stop_words=[word]) == expected
    assert "".join(streamed(client, face, text_input=prompt, stop_words=["never said", word])) == expected


@pytest.mark.parametrize("face", FACES)
def test_bad_words_do_not_come(client: httpx.Client, face: str, prompt: str, tokenizer: Tokenizer) -> None:
    text = generate(client, MODEL, text_input=prompt)
    word = stop_word(tokenizer, text).strip()
    without = generate(client, face, text_input=prompt, bad_words=[word, f" {word}"])
    assert without == generate(client, MODEL, text_input=prompt, bad_words=[word]) != text


@pytest.mark.parametrize("face", FACES)
def test_empty_words_are_none(client: httpx.Client, face: str) -> None:
    assert generate(client, face, stop_words="", bad_words="") == generate(client, MODEL)


@pytest.mark.parametrize("face", FACES)
def test_end_id(client: httpx.Client, face: str, prompt: str, tokenizer: Tokenizer) -> None:
    text = generate(client, MODEL, text_input=prompt)
    word = stop_word(tokenizer, text)
    [end_id] = tokenizer.encode_words(word, "text")
    ended = generate(client, face, text_input=prompt, end_id=end_id, pad_id=end_id)
    assert ended == generate(client, MODEL, text_input=prompt, end_id=end_id) == text[: text.index(word)]


@pytest.mark.parametrize("face", FACES)
def test_the_prompt_comes_first_where_asked(client: httpx.Client, face: str) -> None:
    expected = PROMPTS[0] + generate(client, MODEL)
    assert generate(client, face, exclude_input_in_output=False) == expected


@pytest.mark.parametrize("face", FACES)
def test_log_probabilities(client: httpx.Client, face: str) -> None:
    asked = {"text_input": PROMPTS[0], "max_tokens": 3, "return_log_probs": True}
    found = client.post(f"/v2/models/{face}/generate", json=asked).json()
    expected = client.post(f"/v2/models/{MODEL}/generate", json=asked).json()
    assert found["output_log_probs"] == pytest.approx(expected["output_log_probs"], abs=1e-4)
    assert found["cum_log_probs"] == pytest.approx(expected["cum_log_probs"], abs=1e-4)


@pytest.mark.parametrize("face", FACES)
def test_what_no_model_does_is_refused_by_name(client: httpx.Client, face: str) -> None:
    asked = {"text_input": PROMPTS[0], "max_tokens": 3, "beam_width": 3}
    answer = client.post(f"/v2/models/{face}/generate", json=asked)
    assert answer.status_code == 400
    assert "beam_width" in answer.json()["error"]


@pytest.mark.parametrize("face", FACES)
def test_a_batch_of_several_rows(server: ServerProcess, client: httpx.Client, face: str) -> None:
    with grpcclient.InferenceServerClient(server.grpc_address) as triton:
        found = _stream(triton, face, _inputs(grpcclient, PROMPTS[:3]))
    if len(found) > 1:  # each row has a response of its own, which says whose it is
        found.sort(key=lambda each: each.as_numpy("batch_index")[0][0])
    texts = [text.decode() for each in found for text in each.as_numpy("text_output")]
    assert texts == [generate(client, MODEL, text_input=prompt) for prompt in PROMPTS[:3]]


def test_stock_http_client_infers_on_the_ensemble(server: ServerProcess, client: httpx.Client) -> None:
    triton = httpclient.InferenceServerClient(server.base_url.removeprefix("http://"))
    found = triton.infer("ensemble", _inputs(httpclient, PROMPTS[:2]))
    texts = [text.decode() for text in found.as_numpy("text_output").ravel()]
    assert texts == [generate(client, MODEL, text_input=prompt) for prompt in PROMPTS[:2]]
    triton.close()


def test_the_token_model_by_itself(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[0], "text", add_special_tokens=True)
    asked = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": NUM_TOKENS}
    found = client.post("/v2/models/tensorrt_llm/generate", json=asked).json()
    assert tokenizer.decode(found["output_ids"], skip_special_tokens=True) == generate(client, MODEL)


def _inputs(library: Any, prompts: list[str]) -> list[Any]:
    arrays = {
        "text_input": np.array([[prompt.encode()] for prompt in prompts], np.object_),
        "max_tokens": np.full((len(prompts), 1), NUM_TOKENS, np.int32),
    }
    inputs = []
    for name, array in arrays.items():
        inputs.append(library.InferInput(name, array.shape, "BYTES" if name == "text_input" else "INT32"))
        inputs[-1].set_data_from_numpy(array)
    return inputs


@pytest.mark.parametrize("face", FACES)
def test_nvidias_client_reads_its_answers(
    server: ServerProcess, client: httpx.Client, face: str, is_native: bool
) -> None:
    """It takes element 0 of `text_output` as a text, [0][0] of what has dims [1], and asks for all of these."""
    if face == "tensorrt_llm_bls" and not is_native:
        pytest.skip("the stand-in for NVIDIA's Python stage passes on no metrics")
    flags = dict.fromkeys(("return_perf_metrics", "return_log_probs", "return_generation_logits"), True)
    with grpcclient.InferenceServerClient(server.grpc_address) as triton:
        inputs = _inputs(grpcclient, PROMPTS[:1])
        for name, value in {**flags, "num_return_sequences": 2, "temperature": 1.0}.items():
            array: Any = np.array([[value]], {bool: np.bool_, int: np.int32, float: np.float32}[type(value)])
            inputs.append(grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        found = _stream(triton, face, inputs)
    assert sorted(each.as_numpy("sequence_index")[0][0] for each in found) == [0, 1]
    for each in found:
        assert each.as_numpy("text_output").shape == (1,)
        assert each.as_numpy("text_output")[0].decode() == generate(client, MODEL)
        assert each.as_numpy("kv_cache_alloc_total_blocks").shape == (1, 1)
        assert each.as_numpy("output_log_probs").shape == (1, 1, NUM_TOKENS)
        assert each.as_numpy("generation_logits").shape[:3] == (1, 1, NUM_TOKENS)


def _stream(triton: Any, model: str, inputs: list[Any]) -> list[Any]:
    """Return the responses. A decoupled model answers gRPC clients only on streams."""
    found: list[Any] = []
    triton.start_stream(lambda result, error: found.append(error or result))
    triton.async_stream_infer(model, inputs)
    triton.stop_stream()
    assert not isinstance(found[0], Exception), str(found[0])
    return found
