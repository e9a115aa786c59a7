"""Whoever asks cannot tell TensorRT-LLM from our own executor: on the same tokens both give the same answers.

TensorRT-LLM is the stand-in (`tests/stand_ins`) in the engine process that serves the real one, our own executor has
the suite's runner without a model: both answer with the same hash of the whole context.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from sluice.engine.config import EngineConfig, Runtime
from sluice.pipelines.text.tokenizer import Tokenizer
from tests.engine.delegated.tensorrt_llm.flavours import FLAVOURS
from tests.engine.fake_runner import EchoRunner, echo_next
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.answering import Answering, answering, answering_stand_in, tensors
from tests.stand_ins.model_folders import MAX_POSITIONS, VOCAB_SIZE, make_checkpoint

PROMPT = "Once upon a time"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the sea?"}]
IDS = [11, 12, 13, 14]
NUM_TOKENS = 24


@cache
def tokens_after(prompt: tuple[int, ...], count: int = NUM_TOKENS) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(echo_next(ids, VOCAB_SIZE))
    return ids[len(prompt) :]


EOS = tokens_after(tuple(IDS))[9]
"""Token that ends the answer to IDS after ten tokens; other answers get as many tokens as requested."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "model", with_tokenizer=True, eos_token_id=EOS)


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> EngineConfig:
    """Settings for both engines: no prefix reuse, which one of them does not report."""
    return EngineConfig(
        model_path=str(checkpoint),
        tokenizer_path=str(checkpoint),
        enable_prefix_caching=False,
        runtime=Runtime.TENSORRT_LLM,
    )


@pytest.fixture(scope="module")
def own(checkpoint: Path, config: EngineConfig) -> Iterator[Answering]:
    def engine() -> InProcessEngineClient:
        runner = EchoRunner(vocab_size=VOCAB_SIZE, max_model_len=MAX_POSITIONS, eos_token_ids=(EOS,))
        return InProcessEngineClient(config, runner)

    with answering(engine, checkpoint) as running:
        yield running


NEWEST = pytest.mark.parametrize("theirs", FLAVOURS[-1:], indirect=True)
"""Differences of versions show in the answers to prompts of tokens."""


@pytest.fixture(scope="module", params=FLAVOURS)
def theirs(request: pytest.FixtureRequest, config: EngineConfig) -> Iterator[Answering]:
    with answering_stand_in(config, request.param) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


GREEDY = {"temperature": 0}
SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": NUM_TOKENS},
    {"max_tokens": 1},
    {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS},
    {"max_tokens": NUM_TOKENS, "ignore_eos": True},
    {"max_tokens": NUM_TOKENS, "repetition_penalty": 1.5},
    {"max_tokens": NUM_TOKENS, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"max_tokens": NUM_TOKENS, "seed": 7},
]
OPENAI: list[dict[str, Any]] = [
    *SAMPLING,
    {"max_tokens": 8, "logit_bias": {"77": 50}},
    {"max_tokens": 8, "n": 2},
    {"max_tokens": 8, "cache_salt": "salt"},
    {"max_tokens": 8, "stop_token_ids": [1, 2, 3]},
    {"max_tokens": 2000},
    {"max_tokens": 8, "min_tokens": 9},
    {"max_tokens": 8, "temperature": 3},
    {"max_tokens": 8, "stop": ""},
]
WITH_USAGE = {"stream_options": {"include_usage": True}}


def asked(path: str, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    streamed = {"stream": True, **WITH_USAGE} if stream else {}
    return {**GREEDY, **prompt, **streamed, **fields}


@NEWEST
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
class TestOpenAI:
    @pytest.mark.parametrize("fields", OPENAI, ids=json.dumps)
    def test_answers(self, own: Answering, theirs: Answering, path: str, stream: bool, fields: dict[str, Any]) -> None:
        if stream and fields.get("n"):
            fields = {**fields, "n": 1}
        body = asked(path, stream, fields)
        assert theirs.openai(path, body) == own.openai(path, body)

    def test_log_probabilities(self, own: Answering, theirs: Answering, path: str, stream: bool) -> None:
        logprobs: dict[str, Any] = (
            {"logprobs": 1} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 1}
        )
        body = asked(path, stream, {"max_tokens": NUM_TOKENS, **logprobs})
        assert rounded(theirs.openai(path, body)) == rounded(own.openai(path, body))

    @pytest.mark.parametrize("place", [1, 5, 12])
    def test_stop_strings(
        self, own: Answering, theirs: Answering, path: str, stream: bool, place: int, tokenizer: Tokenizer
    ) -> None:
        """A stop string that begins in the middle of a token and ends in another."""
        whole = json.loads(own.openai(path, asked(path, False, {"max_tokens": NUM_TOKENS}))[1])["choices"][0]
        text = whole["text"] if "text" in whole else whole["message"]["content"]
        body = asked(path, stream, {"max_tokens": NUM_TOKENS, "stop": [text[place : place + 4], "never"]})
        status, answer = theirs.openai(path, body)
        assert (status, answer) == own.openai(path, body)
        assert b'"finish_reason":"stop"' in answer


@NEWEST
@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 1},
        {"best_of": 3},
        {"bad_words": ["e"]},
        {"prompt": ["a", "b"], "n": 2},
    ],
    ids=json.dumps,
)
def test_what_plain_completions_have_alone(own: Answering, theirs: Answering, fields: dict[str, Any]) -> None:
    body = asked("/v1/completions", False, {"max_tokens": 8, **fields})
    status, answer = theirs.openai("/v1/completions", body)
    assert status == 200
    assert rounded((status, answer)) == rounded(own.openai("/v1/completions", body))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": IDS, "max_tokens": NUM_TOKENS},
        {"prompt": IDS, "max_tokens": NUM_TOKENS, "ignore_eos": True},
        {"prompt": IDS, "max_tokens": NUM_TOKENS, "min_tokens": 15},
        {"prompt": IDS, "max_tokens": NUM_TOKENS, "logprobs": 1},
        {"prompt": IDS, "max_tokens": NUM_TOKENS, "stop_token_ids": [tokens_after(tuple(IDS))[3]]},
        {"prompt": [5] * MAX_POSITIONS, "max_tokens": 1},
        {"prompt": [VOCAB_SIZE], "max_tokens": 1},
    ],
    ids=["end", "ignore_eos", "min_tokens", "logprobs", "stop_token_ids", "too long", "unknown token"],
)
def test_prompts_of_tokens(own: Answering, theirs: Answering, stream: bool, fields: dict[str, Any]) -> None:
    body = {**GREEDY, **fields, **({"stream": True, **WITH_USAGE} if stream else {})}
    assert rounded(theirs.openai("/v1/completions", body)) == rounded(own.openai("/v1/completions", body))


def test_the_model_s_own_end_was_among_them(theirs: Answering) -> None:
    status, answer = theirs.openai("/v1/completions", {**GREEDY, "prompt": IDS, "max_tokens": NUM_TOKENS})
    assert status == 200
    told = json.loads(answer)
    assert (told["choices"][0]["finish_reason"], told["usage"]["completion_tokens"]) == ("stop", 10)


def test_the_tokens_are_the_script_s(theirs: Answering, tokenizer: Tokenizer) -> None:
    body = {**GREEDY, "prompt": [7, 8, 9], "max_tokens": NUM_TOKENS}
    text = json.loads(theirs.openai("/v1/completions", body)[1])["choices"][0]["text"]
    detokenizer = tokenizer.detokenizer()
    assert text == detokenizer.feed(tokens_after((7, 8, 9))) + detokenizer.flush()


def test_answers_that_are_made_side_by_side(own: Answering, theirs: Answering) -> None:
    bodies = [{**GREEDY, "prompt": [11, 12, number], "max_tokens": NUM_TOKENS, "stream": True} for number in range(32)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(partial(theirs.openai, "/v1/completions"), bodies))
        assert answers == list(pool.map(partial(own.openai, "/v1/completions"), bodies))
    assert len({answer for _, answer in answers}) == len(bodies)


V2_SAMPLING: list[dict[str, Any]] = [
    *SAMPLING,
    {"max_tokens": 8, "return_log_probs": True},
    {"max_tokens": 8, "return_num_input_tokens": True, "return_num_output_tokens": True},
    {"max_tokens": 8, "end_id": -1},
    {"max_tokens": 0},
    {"max_tokens": 8, "num_return_sequences": 2},
    {"max_tokens": 8, "return_perf_metrics": True},
]
TEXT_FACE = [
    *({"text_input": PROMPT, **fields} for fields in (*V2_SAMPLING, {"max_tokens": 8, "stop_words": ["e"]})),
    {"messages": json.dumps(MESSAGES), "max_tokens": 8},
]
TOKEN_FACE = [
    {"input_ids": IDS, **fields}
    for fields in (
        *V2_SAMPLING,
        {"max_tokens": NUM_TOKENS, "end_id": tokens_after(tuple(IDS))[4]},
        {"max_tokens": NUM_TOKENS, "stop_words_list": [*tokens_after(tuple(IDS))[2:4], 2, -1]},
        {"max_tokens": NUM_TOKENS, "bad_words_list": [tokens_after(tuple(IDS))[2], 1]},
        {"max_tokens": NUM_TOKENS, "exclude_input_in_output": True},
    )
]
FACES = [*TEXT_FACE, *TOKEN_FACE]


def rounded(value: Any) -> Any:
    """Log probabilities have 32 bits in one engine and 64 in the other."""
    if isinstance(value, bytes):
        try:
            return rounded(json.loads(value))
        except ValueError:
            return value
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return type(value)(map(rounded, value)) if isinstance(value, list | tuple) else value


@NEWEST
@pytest.mark.parametrize("fields", FACES, ids=json.dumps)
def test_generate(own: Answering, theirs: Answering, fields: dict[str, Any]) -> None:
    assert rounded(theirs.generate(fields)) == rounded(own.generate(fields))


@NEWEST
@pytest.mark.parametrize("fields", [*TEXT_FACE[::5], *TOKEN_FACE[2::5]], ids=json.dumps)
class TestOtherWaysOfV2:
    def test_generate_stream(self, own: Answering, theirs: Answering, fields: dict[str, Any]) -> None:
        body = {**fields, "stream": True}
        assert rounded(theirs.generate_stream(body)) == rounded(own.generate_stream(body))

    def test_infer(self, own: Answering, theirs: Answering, fields: dict[str, Any]) -> None:
        inputs = [json_tensor(name, value) for name, value in fields.items()]
        assert rounded(theirs.infer(inputs)) == rounded(own.infer(inputs))

    def test_model_infer(self, own: Answering, theirs: Answering, fields: dict[str, Any]) -> None:
        request = grpc_request(fields)
        answers = [each.model_infer(request) for each in (theirs, own)]
        if fields.get("return_log_probs"):
            answers = [rounded(tensors(service_pb2.ModelInferResponse.FromString(each))) for each in answers]
        assert answers[0] == answers[1]

    def test_model_stream_infer(self, own: Answering, theirs: Answering, fields: dict[str, Any]) -> None:
        request = grpc_request({**fields, "stream": True})
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        assert rounded(theirs.model_stream_infer(request)) == rounded(own.model_stream_infer(request))


DATATYPES = {str: "BYTES", bool: "BOOL", float: "FP32", int: "INT32"}
"""Datatypes of inputs, by the type of their values."""


def as_array(name: str, value: Any) -> tuple[str, Any]:
    """Return the declared datatype, and the elements."""
    values = value if isinstance(value, list) else [value]
    datatype = "UINT64" if name == "seed" else DATATYPES[type(values[0])]
    array = np.array(values, triton_to_np_dtype(datatype))
    return datatype, array.reshape(2, -1) if name.endswith("words_list") else array


def json_tensor(name: str, value: Any) -> dict[str, Any]:
    datatype, array = as_array(name, value)
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}


def grpc_request(fields: dict[str, Any]) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="rill", id="same")
    for name, value in fields.items():
        datatype, array = as_array(name, value)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        request.raw_input_contents.append(raw)
    return request
