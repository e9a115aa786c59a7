"""Requests with token inputs, under either name of each, over a real executor whose runner has no model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.pipelines.llm.configuration import default_llm_config
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.tokens import StopSequences
from sluice.serving.model import infer_one
from sluice.serving.request import InferResponse
from tests.pipelines.llm.calls import ask, echo, request, responses, stream
from tests.serving.config.parts import parse_config

IDS = [70, 71, 72, 73]
Make = Callable[[ModelConfig], LlmModel]

NVIDIA = """
name: "tensorrt_llm"
backend: "tensorrtllm"
max_batch_size: 8
model_transaction_policy { decoupled: true }
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [-1] allow_ragged_batch: true },
  { name: "input_lengths" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [1] },
  { name: "end_id" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "pad_id" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "stop_words_list" data_type: TYPE_INT32 dims: [2, -1] optional: true },
  { name: "bad_words_list" data_type: TYPE_INT32 dims: [2, -1] optional: true },
  { name: "beam_width" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "temperature" data_type: TYPE_FP32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "runtime_top_k" data_type: TYPE_INT32 dims: [1] reshape: { shape: [] } optional: true },
  { name: "return_log_probs" data_type: TYPE_BOOL dims: [1] reshape: { shape: [] } optional: true },
  { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [1] reshape: { shape: [] } optional: true },
  { name: "draft_input_ids" data_type: TYPE_INT32 dims: [-1] optional: true },
  { name: "embedding_bias" data_type: TYPE_FP32 dims: [-1] optional: true },
  { name: "stop" data_type: TYPE_BOOL dims: [1] optional: true },
  { name: "streaming" data_type: TYPE_BOOL dims: [1] optional: true }
]
output [
  { name: "output_ids" data_type: TYPE_INT32 dims: [-1, -1] },
  { name: "sequence_length" data_type: TYPE_INT32 dims: [-1] },
  { name: "cum_log_probs" data_type: TYPE_FP32 dims: [-1] },
  { name: "output_log_probs" data_type: TYPE_FP32 dims: [-1, -1] },
  { name: "context_logits" data_type: TYPE_FP32 dims: [-1, -1] },
  { name: "batch_index" data_type: TYPE_INT32 dims: [1] },
  { name: "sequence_index" data_type: TYPE_INT32 dims: [1] }
]
"""


@pytest.fixture
def nvidia(make: Make) -> LlmModel:
    """The inputs and outputs of tensorrtllm_backend's token model."""
    return make(parse_config(NVIDIA, "config.pbtxt")[0])


def by_name(response: InferResponse) -> dict[str, np.ndarray[Any, Any]]:
    assert response.error is None
    return {each.name: each.array for each in response.outputs}


def words_list(*words: list[int]) -> np.ndarray[Any, Any]:
    """TensorRT-LLM's list of words, as its clients' tools make it."""
    flat = [token_id for word in words for token_id in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return np.array([[flat, ends + [-1] * (len(flat) - len(ends))]], np.int32)


class TestSeed:
    """Seed 000's configuration: not decoupled, one dimension for output_ids."""

    FIELDS = {"input_ids": IDS, "input_lengths": 4, "request_output_len": 6}  # noqa: RUF012

    async def test_output_ids_are_the_prompt_and_what_follows(self, seed: LlmModel) -> None:
        answer = by_name(await infer_one(seed, request(seed, self.FIELDS)))
        assert answer.keys() == {"output_ids", "sequence_length"}
        assert answer["output_ids"].shape == (1, 10)
        assert answer["output_ids"].dtype == np.int32
        assert answer["output_ids"][0].tolist() == [*IDS, *echo(IDS, 6)]
        assert answer["sequence_length"].tolist() == [[10]]

    async def test_sampling_config_is_json(self, seed: LlmModel) -> None:
        async def sample(config: str) -> Any:
            return (await ask(seed, self.FIELDS | {"sampling_config": config}))["output_ids"]

        sampled = await sample('{"temperature": 1.9, "random_seed": 3, "top_k": 0}')
        assert sampled == await sample('{"temperature": [1.9], "seed": 3, "top_p": 1.0}')
        assert sampled != await sample('{"top_k": 1}') == [*IDS, *echo(IDS, 6)]
        assert await sample('{"exclude_input_in_output": true}') == echo(IDS, 6)

    async def test_it_is_not_decoupled(self, seed: LlmModel) -> None:
        assert not seed.is_decoupled_for(request(seed, self.FIELDS | {"streaming": True}))
        with pytest.raises(SluiceError, match="deployed using decoupled mode"):
            await ask(seed, self.FIELDS | {"streaming": True})
        assert (await ask(seed, self.FIELDS | {"streaming": False}))["sequence_length"] == 10

    async def test_a_padded_batch_is_its_rows(self, seed: LlmModel) -> None:
        rows = [[70, 71, 72, 73], [80, 81], [90, 91, 92]]
        fields = {
            "input_ids": np.array([row + [0] * (4 - len(row)) for row in rows], np.int32),
            "input_lengths": np.array([[len(row)] for row in rows], np.int32),
            "request_output_len": np.array([[3], [6], [2]], np.int32),
        }
        answer = by_name(await infer_one(seed, request(seed, fields, parameters={"pad_id": 9})))
        assert answer["sequence_length"].tolist() == [[7], [8], [5]]
        assert answer["output_ids"].tolist() == [
            [*rows[0], *echo(rows[0], 3), 9],
            [*rows[1], *echo(rows[1], 6)],
            [*rows[2], *echo(rows[2], 2), 9, 9, 9],
        ]

    async def test_rows_are_padded_with_the_models_end(self, seed: LlmModel) -> None:
        fields = {
            "input_ids": np.array([IDS, IDS], np.int32),
            "input_lengths": np.array([[4], [2]], np.int32),
            "request_output_len": np.array([[1], [1]], np.int32),
        }
        answer = by_name(await infer_one(seed, request(seed, fields)))
        assert answer["output_ids"][1].tolist() == [*IDS[:2], *echo(IDS[:2], 1), 5, 5]


class TestNvidia:
    FIELDS = {"input_ids": IDS, "input_lengths": 4, "request_output_len": 6}  # noqa: RUF012

    async def test_there_is_a_beam_dimension(self, nvidia: LlmModel) -> None:
        fields = self.FIELDS | {"beam_width": 1, "return_log_probs": True}
        answer = by_name(await infer_one(nvidia, request(nvidia, fields)))
        assert answer["output_ids"].tolist() == [[[*IDS, *echo(IDS, 6)]]]
        assert answer["sequence_length"].tolist() == [[10]]
        assert (answer["cum_log_probs"].shape, answer["output_log_probs"].shape) == ((1, 1), (1, 1, 6))
        assert answer["cum_log_probs"][0, 0] == pytest.approx(answer["output_log_probs"].sum(), rel=1e-5)
        assert not answer.keys() & {"batch_index", "sequence_index", "context_logits"}

    async def test_a_stream_brings_the_new_tokens(self, nvidia: LlmModel) -> None:
        parts = [part async for part in responses(nvidia, self.FIELDS | {"streaming": True})]
        token_ids = [token_id for part in parts for token_id in by_name(part)["output_ids"][0][0].tolist()]
        assert token_ids == echo(IDS, 6)
        assert len(parts) > 3
        assert all(
            by_name(part)["output_ids"].shape == (1, 1, by_name(part)["sequence_length"][0, 0]) for part in parts
        )
        assert [part.is_final for part in parts] == [False] * (len(parts) - 1) + [True]

    @pytest.mark.parametrize("streams", [True, False])
    async def test_end_id_is_not_part_of_the_output(self, nvidia: LlmModel, streams: bool) -> None:
        expected = echo(IDS, 6)
        fields = self.FIELDS | {"end_id": expected[3], "exclude_input_in_output": True, "streaming": streams}
        parts = [by_name(part) async for part in responses(nvidia, fields)]
        token_ids = [token_id for part in parts for token_id in part["output_ids"][0][0].tolist()]
        assert token_ids == expected[:3]
        assert sum(part["sequence_length"][0, 0] for part in parts) == 3

    async def test_stop_words_are_part_of_the_output(self, nvidia: LlmModel) -> None:
        expected = echo(IDS, 6)
        words = words_list([1, 2, 3], expected[2:4])
        answer = await ask(nvidia, self.FIELDS | {"stop_words_list": words, "exclude_input_in_output": True})
        assert answer["output_ids"] == expected[:4]

    async def test_bad_words_do_not_come(self, nvidia: LlmModel) -> None:
        first, second = echo(IDS, 2)
        for words, kept in ((words_list([first]), 0), (words_list([first, second]), 1)):
            answer = await ask(nvidia, self.FIELDS | {"bad_words_list": words, "exclude_input_in_output": True})
            assert answer["output_ids"][:kept] == [first][:kept]
            assert answer["output_ids"][kept] != [first, second][kept]

    async def test_rows_have_their_own_words(self, nvidia: LlmModel) -> None:
        expected = echo(IDS, 6)
        words = np.concatenate([words_list([expected[0]]), words_list([expected[1]])])
        fields = {
            "input_ids": np.array([IDS, IDS], np.int32),
            "input_lengths": np.array([[4], [4]], np.int32),
            "request_output_len": np.array([[6], [6]], np.int32),
            "stop_words_list": words,
        }
        answer = by_name(await infer_one(nvidia, request(nvidia, fields)))
        assert answer["sequence_length"].tolist() == [[5], [6]]

    async def test_a_second_request_stops_the_first(self, nvidia: LlmModel) -> None:
        events = responses(nvidia, self.FIELDS | {"request_output_len": 400, "streaming": True}, id="7")
        first = await anext(events)
        assert first.error is None
        stopping = await infer_one(nvidia, request(nvidia, self.FIELDS | {"stop": True}, id="7"))
        assert stopping.is_empty
        rest = [part async for part in events]
        assert (rest[-1].error, rest[-1].is_final) == (None, True)
        assert by_name(rest[-1])["output_ids"].shape == (1, 1, 0)
        with pytest.raises(SluiceError, match="must have its id"):
            await infer_one(nvidia, request(nvidia, self.FIELDS | {"stop": True}))

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"draft_input_ids": [5, 6]}, "input 'draft_input_ids' is not supported; leave it out"),
            (
                {"embedding_bias": [0.0, 101.0]},
                "'embedding_bias' must be between -100 and 100 for each token, got 101 for",
            ),
            (
                {"embedding_bias": [0.0, np.nan]},
                "'embedding_bias' must be between -100 and 100 for each token, got nan",
            ),
            ({"embedding_bias": [0.0] * 4096 + [1.0]}, "must be 0 for what is no token of this model, which has 4096"),
            ({"input_lengths": 5}, "input_lengths must be between 0 and the 4 tokens of input_ids, got 5"),
            ({"input_lengths": 0}, "prompt must have at least 1 token, got 0"),
            ({"input_ids": [1, 4096, 2, 3]}, "token ids of the prompt must be between 0 and 4095, got 4096"),
            ({"stop_words_list": np.array([[[1, 2], [3, -1]]], np.int32)}, "stop_words_list must hold two rows"),
            ({"bad_words_list": np.array([[[1, 2], [2, 1]]], np.int32)}, "bad_words_list must hold two rows"),
            ({"bad_words_list": np.array([[[9999], [1]]], np.int32)}, "token ids of bad_words must be between 0 and"),
        ],
    )
    async def test_refuses(self, nvidia: LlmModel, fields: dict[str, Any], words: str) -> None:
        with pytest.raises(SluiceError, match=words):
            await ask(nvidia, self.FIELDS | fields)

    async def test_a_bias_of_every_token_is_obeyed(self, nvidia: LlmModel) -> None:
        bias = np.zeros((1, 4096), np.float32)
        bias[0, 300] = 50.0
        assert (await ask(nvidia, self.FIELDS | {"embedding_bias": bias}))["output_ids"][len(IDS) :] == [300] * 6

    async def test_neutral_values_are_taken(self, nvidia: LlmModel) -> None:
        fields = {"embedding_bias": [0.0] * 7, "draft_input_ids": np.empty((1, 0), np.int32)}
        assert (await ask(nvidia, self.FIELDS | fields))["output_ids"] == [*IDS, *echo(IDS, 6)]


class TestUnbatched:
    async def test_several_parts_join_to_the_whole(self, model: LlmModel) -> None:
        fields = {"input_ids": IDS, "max_tokens": 9, "exclude_input_in_output": True, "return_log_probs": True}
        whole = await ask(model, fields)
        parts = await stream(model, fields | {"streaming": True})
        joined = [parts_ids for part in parts for parts_ids in np.ravel(part["output_ids"]).tolist()]
        assert joined == whole["output_ids"]
        assert parts[-1]["cum_log_probs"] == whole["cum_log_probs"]
        joined = [value for part in parts for value in np.ravel(part["output_log_probs"]).tolist()]
        assert joined == whole["output_log_probs"]

    async def test_dims_may_have_the_rows(self, make: Make) -> None:
        config = default_llm_config("echo")
        for each in config.input:
            if each.name == "input_ids":
                del each.dims[:]
                each.dims.extend([-1, -1])
        model = make(config)
        fields = {"input_ids": np.array([IDS, IDS[::-1]], np.int32), "max_tokens": 3}
        answer = by_name(await infer_one(model, request(model, fields)))
        assert answer["output_ids"].tolist() == [[*IDS, *echo(IDS, 3)], [*IDS[::-1], *echo(IDS[::-1], 3)]]
        with pytest.raises(SluiceError, match="prompt must have at least 1 token"):
            await ask(model, {"input_ids": np.empty((0, 4), np.int32)})

    async def test_the_models_own_end_is_not_shown(self, model: LlmModel) -> None:
        prompt = next(ids for ids in ([n] for n in range(100, 4000)) if 5 in echo(ids, 8))
        place = echo(prompt, 8).index(5)
        answer = await ask(model, {"input_ids": prompt, "max_tokens": 20})
        assert np.ravel(answer["output_ids"]).tolist() == [*prompt, *echo(prompt, place)]
        for end in ({"ignore_eos": True}, {"end_id": -1}):
            answer = await ask(model, {"input_ids": prompt, "max_tokens": 20} | end)
            assert answer["output_ids"] == [*prompt, *echo(prompt, 20)]

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"input_ids": [1], "stop_words": ["a"]}, "stop_words go with text_input"),
            ({"text_input": "a", "stop_words_list": words_list([1])[0]}, "stop_words_list goes with input_ids"),
            ({"input_ids": [1], "return_stop_reason": True}, "return_stop_reason must be false with input_ids"),
        ],
    )
    async def test_words_go_with_their_face(self, model: LlmModel, fields: dict[str, Any], words: str) -> None:
        with pytest.raises(SluiceError, match=words):
            parameters = {name: fields.pop(name) for name in list(fields) if name not in model.spec.inputs}
            await ask(model, fields, parameters=parameters)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stop_sequences_do_not_depend_on_how_tokens_come(size: int) -> None:
    token_ids = [1, 2, 1, 2, 3, 9, 2, 3, 4]
    stops = StopSequences(((2, 3, 4), (9, 9)), 0)
    found = [stops.find(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    assert [each for each in found[:-1] if each is not None] == []
    assert found[-1] == (len(token_ids) - 1) % size + 1


def test_stop_sequences_within_min_tokens_do_not_count() -> None:
    stops = StopSequences(((7,),), 2)
    assert stops.find([7, 7, 1, 7, 7]) == 4
    assert StopSequences((), 0).find([1, 2]) is None
