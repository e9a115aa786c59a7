"""Published configurations and the client programs printed beside them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openai
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer
from tritonclient.utils import InferenceServerException

from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.paths import DATA, RILL_TOKENIZER
from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, HTTP, Library, text
from tests.triton.onnx_models import write_text_classifier
from tests.triton.server import http_address, serving
from tests.triton.test_clients_stream import streaming
from tests.waiting import PATIENCE_S

PROMPT = "Once upon a time"
MAX_TOKENS = 12
LONG_ANSWER = 400
INPUT_IDS = np.array([[101, 2054, 2003, 1996, 2034, 102]], np.int64)
"""The printed program's input of the classifier."""
WITHOUT_MASK = {
    "platform": "onnxruntime_onnx",
    "max_batch_size": 64,
    "input": [{"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]}],
    "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [2]}],
}


def published_config(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DATA / "seed_configs" / name, folder / "config.pbtxt")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with versions 1 to 3; the configuration asks for the latest two."""
    folder = tmp_path_factory.mktemp("seeds") / "models" / "text_classifier"
    write_text_classifier(folder)
    for version in "23":
        shutil.copytree(folder / "1", folder / version)
    published_config(folder, "002_text_classifier.pbtxt")
    return folder


@pytest.fixture(scope="module")
def seeded(classifier: Path) -> Iterator[ServerProcess]:
    models = classifier.parent
    published_config(models / "llama3_8b", "000_llama3_8b.pbtxt")
    write_tiny_checkpoint(models / "llama3_8b" / "1")
    _write_streaming_twin(models)
    # In bf16, a prompt that is partly cached may be answered otherwise on torch.
    flags = ("--dtype=f32", "--model-control-mode=explicit", "--allow-model-file-override=true", "--load-model=*")
    with serving(models, models.with_name("log"), *flags) as server:
        yield server


def _write_streaming_twin(models: Path) -> None:
    """The same model, declared to answer more than once."""
    config = (models / "llama3_8b" / "config.pbtxt").read_text().replace("llama3_8b", "llama3_8b_stream")
    (models / "llama3_8b_stream" / "1").mkdir(parents=True)
    (models / "llama3_8b_stream" / "config.pbtxt").write_text(
        config
        + "model_transaction_policy { decoupled: true }\n"
        + 'parameters { key: "gpt_model_path" value: { string_value: "../llama3_8b/1" } }\n'
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(RILL_TOKENIZER)


def run_program(name: str, **settings: object) -> dict[str, Any]:
    """The program's variables once it has ended."""
    path = DATA / "seeds" / name
    variables: dict[str, Any] = {"__name__": "__main__", **settings}
    exec(compile(path.read_text(), path, "exec"), variables)
    variables["client"].close()
    return variables


def logits_of(classifier: Path, input_ids: NDArray[np.int64], mask: NDArray[np.int64]) -> Any:
    session = onnxruntime.InferenceSession(classifier / "1" / "model.onnx")
    return session.run(None, {"input_ids": input_ids, "attention_mask": mask})[0]


def token_inputs(library: Library, tokens: list[int], **more: NDArray[Any]) -> list[Any]:
    values = {
        "input_ids": np.array([tokens], np.int32),
        "input_lengths": np.array([[len(tokens)]], np.int32),
        "request_output_len": np.array([[MAX_TOKENS]], np.int32),
        **more,
    }
    return [library.tensor(name, value) for name, value in values.items()]


def greedy_answer(server: ServerProcess, tokens: list[int], **more: NDArray[Any]) -> list[int]:
    """Return the prompt and its continuation, from one HTTP answer."""
    with HTTP.client(server) as client:
        result = client.infer("llama3_8b", token_inputs(HTTP, tokens, **more))
    [length] = result.as_numpy("sequence_length")[0]
    answer: list[int] = result.as_numpy("output_ids")[0].tolist()
    assert length == len(answer)
    return answer


def test_the_llm_program(seeded: ServerProcess, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    program = run_program("triton_http_llm.py", ADDRESS=http_address(seeded), TOKENIZER=str(RILL_TOKENIZER))
    with HTTP.client(seeded) as program["client"]:
        said = program["generate_text"](PROMPT, MAX_TOKENS)
    tokens = greedy_answer(seeded, tokenizer.encode(PROMPT))
    assert said == tokenizer.decode(tokens, skip_special_tokens=True)
    assert said.startswith(PROMPT)
    assert len(tokens) > len(tokenizer.encode(PROMPT))


def test_the_same_llm_over_the_openai_routes(seeded: ServerProcess, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    with openai.OpenAI(base_url=f"{seeded.base_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        assert "llama3_8b" in {model.id for model in client.models.list()}
        answer = client.chat.completions.create(
            model="llama3_8b",
            messages=messages,  # type: ignore[arg-type]
            max_completion_tokens=MAX_TOKENS,
            temperature=0,
        )
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens = greedy_answer(seeded, prompt)[len(prompt) :]
    assert answer.choices[0].message.content == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_the_llm_over_a_stream(seeded: ServerProcess, tokenizer: Any, is_streaming: bool) -> None:
    prompt = tokenizer.encode(PROMPT)
    # Tokens that wait for one another share a response: a busy machine may merge a short answer into one.
    length = {"request_output_len": np.array([[LONG_ANSWER if is_streaming else MAX_TOKENS]], np.int32)}
    expected = greedy_answer(seeded, prompt, **length)
    config = json.dumps({"temperature": 1.0, "runtime_top_k": 1, "top_k": 1}).encode()
    streams = np.array([[is_streaming]])
    inputs = token_inputs(GRPC, prompt, sampling_config=text(config)[None], streaming=streams, **length)
    arrived: list[Any] = []
    with streaming(seeded) as (client, answers):
        client.async_stream_infer("llama3_8b_stream", inputs, enable_empty_final_response=True)
        while not arrived or not arrived[-1].get_response().parameters["triton_final_response"].bool_param:
            arrived.append(answers.next())
        client.stop_stream()
    pieces = [result.as_numpy("output_ids")[0].tolist() for result in arrived if result.get_response().outputs]
    assert (len(pieces) > 1) == is_streaming
    said = [token for piece in pieces for token in piece]
    assert said == (expected[len(prompt) :] if is_streaming else expected)


def test_streaming_must_be_declared(seeded: ServerProcess) -> None:
    """A request to stream to a model that is not decoupled is refused, as by NVIDIA's backend."""
    inputs = token_inputs(HTTP, [1, 2, 3], streaming=np.array([[True]]))
    with HTTP.client(seeded) as client, pytest.raises(InferenceServerException, match="deployed using decoupled mode"):
        client.infer("llama3_8b", inputs)


def test_wrong_sampling_is_refused(seeded: ServerProcess) -> None:
    inputs = token_inputs(HTTP, [1, 2, 3], sampling_config=text(b'{"temperature": "hot"}')[None])
    with HTTP.client(seeded) as client, pytest.raises(InferenceServerException, match="temperature"):
        client.infer("llama3_8b", inputs)


def test_the_classifier_answers_as_onnxruntime_does(seeded: ServerProcess, classifier: Path) -> None:
    input_ids = np.arange(40, dtype=np.int64).reshape(4, 10)
    mask = (input_ids % 3 != 0).astype(np.int64)
    with GRPC.client(seeded) as client:
        assert list(client.get_model_metadata("text_classifier").versions) == ["2", "3"]
        inputs = [GRPC.tensor("input_ids", input_ids), GRPC.tensor("attention_mask", mask)]
        result = client.infer("text_classifier", inputs)
    expected = logits_of(classifier, input_ids, mask)
    np.testing.assert_allclose(result.as_numpy("logits"), expected, rtol=1e-6)


def test_the_classifier_program_forgets_an_input(seeded: ServerProcess) -> None:
    """The program as printed does not fit the configuration printed beside it; Triton refuses it too."""
    with pytest.raises(InferenceServerException, match=r"missing required input.*attention_mask"):
        run_program("triton_grpc_classifier.py", ADDRESS=seeded.grpc_address)


def test_the_classifier_program(
    seeded: ServerProcess, classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program runs with a model that lacks the input that it forgets, loaded over the other one."""
    model = write_text_classifier(tmp_path, is_masked=False).read_bytes()
    with GRPC.client(seeded) as client:
        client.load_model("text_classifier", config=json.dumps(WITHOUT_MASK), files={"file:1/model.onnx": model})
        predictions = run_program("triton_grpc_classifier.py", ADDRESS=seeded.grpc_address)["predictions"]
        client.unload_model("text_classifier")
    expected = logits_of(classifier, INPUT_IDS, np.ones_like(INPUT_IDS))
    np.testing.assert_allclose(predictions, expected, rtol=1e-6)
    assert capsys.readouterr().out == f"Predictions: {predictions}\n"
