"""Lookup of a repository as encoders: their inputs and outputs, and errors of models that are no encoders."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import pytest_asyncio
from onnx import TensorProto, helper
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.request import InferResponse
from sluice.serving.spec import build_spec
from sluice.serving.tensors.tensor import Array, Tensor
from tests import paths
from tests.pipelines.rag.bundled import copy_models, serving, write_config
from tests.serving.backends.builders import Lookup
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

DATA = paths.DATA / "rag"
SENTENCES: list[str] = json.loads((DATA / "sentences.json").read_text())
VECTORS = np.load(DATA / "sentence_vectors.npy").astype(np.float32)
DIM = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ModelRepository]:
    """The bundled encoders, loaded once."""
    async with serving(copy_models(tmp_path_factory.mktemp("models"))) as repository:
        yield repository


class TextModel(Model):
    """Encodes each text as the vector (number of letters, 1, 0, 0), and records texts."""

    def __init__(
        self, max_batch_size: int = 0, dims: Sequence[int] = (DIM,), datatype: str = "FP32", **parameters: str
    ) -> None:
        config = ModelConfig(name="mine", max_batch_size=max_batch_size)
        config.input.add(name="sentence", data_type=DataType.TYPE_STRING, dims=[1])
        config.output.add(name="vector", data_type=DataType.Value(f"TYPE_{datatype}"), dims=dims)
        for key, value in parameters.items():
            config.parameters[key].string_value = value
        super().__init__(config, build_spec(config, 1))
        self.datatype = datatype
        self.asked: list[list[str]] = []
        self.priorities: list[int] = []
        self.held: list[InferJob] = []
        self.is_holding = False
        self.most_at_once = 0
        self.failure: SluiceError | None = None

    def _start(self, job: InferJob) -> None:
        self.priorities.append(job.request.priority)
        self.asked.append([each.decode() for each in job.request.inputs["sentence"].array.ravel().tolist()])
        if self.failure is not None and len(self.asked) > 1:
            job.fail(self.failure)
            return
        if self.is_holding:
            self.held.append(job)
            self.most_at_once = max(self.most_at_once, sum(not each.is_finished for each in self.held))
            job.on_cancel = lambda: job.fail(SluiceError(ErrorCode.CANCELLED, "cancelled"))
            return
        self.answer(job)

    def answer(self, job: InferJob) -> None:
        texts = job.request.inputs["sentence"].array.ravel().tolist()
        array = np.array([[len(text), 1, 0, 0] for text in texts], self.spec.outputs["vector"].data_type.dtype)
        if self.spec.max_batch_size == 0:
            array = array[0]
        if len(self.spec.outputs["vector"].dims) == 2:
            array = np.stack([array, array], axis=-2)
        job.respond(InferResponse([Tensor("vector", self.datatype, array.shape, array=array)]))

    async def close(self) -> None:
        self.retire()


def encoder_of(model: Model) -> TextEncoder:
    return TextEncoder(Lookup(model), "mine")


def expected(*texts: str) -> Array:
    vectors = np.array([[len(text.encode()), 1, 0, 0] for text in texts], np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


# --- the bundled one


@pytest.mark.parametrize("name", ["query_encoder", "sentence_encoder"])
async def test_the_bundled_encoder_by_its_texts_and_by_its_tokens(models: ModelRepository, name: str) -> None:
    encoder = TextEncoder(models, name)
    texts = [*SENTENCES, *SENTENCES[:10]]
    vectors = await encoder.encode_documents(texts)
    assert vectors.shape == (100, 384) and vectors.dtype == np.float32
    assert (vectors[:90] * VECTORS).sum(axis=1).min() >= 0.99
    assert np.abs(vectors[90:] - vectors[:10]).max() < 1e-5
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.abs(await encoder.encode_query(texts[40]) - vectors[40]).max() < 1e-5
    assert await encoder.dim() == 384


async def test_tokens_are_admitted_before_they_are_encoded(models: ModelRepository) -> None:
    encoder, asked = TextEncoder(models, "sentence_encoder"), []

    async def admit(num_tokens: int) -> None:
        asked.append(num_tokens)
        if len(asked) > 1:
            raise SluiceError(ErrorCode.OVERLOADED, "no more")

    found = await encoder.embed(SENTENCES[:3], str, admit=admit)
    before = models.find("sentence_encoder").statistics.infer.success.count
    with pytest.raises(SluiceError, match="no more"):
        await encoder.embed(SENTENCES[:3], str, admit=admit)
    assert asked == [found.num_tokens] * 2
    assert models.find("sentence_encoder").statistics.infer.success.count == before


@pytest.mark.parametrize("name", ["query_encoder", "sentence_encoder"])
async def test_broken_unicode_is_taken(models: ModelRepository, name: str) -> None:
    encoder, text = TextEncoder(models, name), "half \ud83d a pair"
    assert list(await encoder.token_starts(text)) == [0, 5, 7, 9]
    [broken, marked] = await encoder.encode_documents([text, "half ? a pair"])
    assert np.array_equal(broken, marked)
    assert np.allclose(await encoder.encode_query(text), marked, atol=1e-5)


@pytest.mark.parametrize("name", ["query_encoder", "sentence_encoder"])
async def test_token_starts_are_the_tokenizers(models: ModelRepository, name: str) -> None:
    encoder = TextEncoder(models, name)
    assert list(await encoder.token_starts("Cats\n\nrun away!")) == [0, 6, 10, 14]
    text = "One sentence of words. " * 5_000
    starts = list(await encoder.token_starts(text))
    assert len(starts) == 5 * 5_000
    assert starts[:6] == [0, 4, 13, 16, 21, 23] and starts == sorted(starts)


# --- any other


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "FP64"])
@pytest.mark.parametrize("dims", [(DIM,), (-1,), (-1, DIM)])
@pytest.mark.parametrize("max_batch_size", [0, 3])
async def test_outputs_of_any_float_become_vectors(datatype: str, dims: Sequence[int], max_batch_size: int) -> None:
    texts = ["aa", "", "bbbbb", "c", "dddd"]
    model = TextModel(max_batch_size, dims, datatype)
    encoder = encoder_of(model)
    assert np.allclose(await encoder.encode_documents(texts), expected(*texts), atol=1e-3)
    assert max(map(len, model.asked)) == (3 if max_batch_size and len(dims) == 1 else 1)
    assert await encoder.dim() == DIM
    assert (await encoder.encode_documents([])).shape == (0, DIM)


async def test_questions_go_before_documents() -> None:
    model = TextModel(8)
    encoder = encoder_of(model)
    await encoder.encode_documents(["a", "b"])
    await encoder.encode_query("c")
    documents, question = model.priorities
    assert (question, documents > question) == (0, True)


async def test_prefixes_stand_before_texts() -> None:
    model = TextModel(8, query_prefix="query: ", document_prefix="passage: ")
    encoder = encoder_of(model)
    await encoder.encode_query("x")
    await encoder.encode_documents(["y", "z"])
    assert model.asked == [["query: x"], ["passage: y", "passage: z"]]


async def test_texts_of_like_length_go_together_and_come_back_in_order() -> None:
    texts = [letter * length for letter, length in zip("abcdef", (1, 90, 2, 80, 3, 70), strict=True)]
    model = TextModel(3)
    assert np.allclose(await encoder_of(model).encode_documents(texts), expected(*texts))
    assert [[len(text) for text in asked] for asked in model.asked] == [[1, 2, 3], [70, 80, 90]]


async def test_long_texts_are_few_at_once() -> None:
    model = TextModel(64)
    await encoder_of(model).encode_documents(["x" * 300] * 5)
    assert [len(asked) for asked in model.asked] == [2, 2, 1]


@pytest.mark.parametrize(("max_batch_size", "bound"), [(0, 16), (8, 2)])
async def test_requests_at_once_are_bounded_and_end_with_the_caller(max_batch_size: int, bound: int) -> None:
    model = TextModel(max_batch_size)
    model.is_holding = True
    task = asyncio.create_task(encoder_of(model).encode_documents(["x"] * 100))
    await until(lambda: len(model.held) == bound)
    model.answer(model.held[0])
    await until(lambda: len(model.held) == bound + 1)
    assert model.most_at_once == bound
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: model.is_idle)
    assert all(job.is_finished for job in model.held)
    assert len(model.held) == bound + 1, "nothing begins after the end"


async def test_the_first_failure_ends_the_others_and_names_the_encoder() -> None:
    model = TextModel()
    model.failure = SluiceError(ErrorCode.UNAVAILABLE, "its process is gone", retry_after_s=2.0)
    with pytest.raises(SluiceError, match="encoder 'mine': its process is gone") as caught:
        await encoder_of(model).encode_documents(["x"] * 100)
    assert caught.value.code is ErrorCode.UNAVAILABLE and caught.value.retry_after_s == 2.0
    assert len(model.asked) <= 1 + 16, "what was under way is all that is asked"


async def test_a_model_that_does_not_serve_is_named() -> None:
    encoder = TextEncoder(Lookup(), "gone")
    for call in (encoder.dim(), encoder.encode_query("x"), encoder.encode_documents(["x"]), encoder.token_starts("x")):
        with pytest.raises(SluiceError, match="'gone'") as caught:
            await call
        assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_a_reload_is_seen() -> None:
    models = Lookup(TextModel(dims=(DIM,)))
    encoder = TextEncoder(models, "mine")
    assert await encoder.dim() == DIM
    models.models["mine"] = TextModel(dims=(7,))
    assert await encoder.dim() == 7


async def test_what_is_no_encoder_is_refused_with_the_reason() -> None:
    model = TextModel()
    config = ModelConfig()
    config.CopyFrom(model.config)
    config.input.add(name="other", data_type=DataType.TYPE_FP32, dims=[1])
    model.spec = build_spec(config, 1)
    with pytest.raises(SluiceError, match=r"'mine' cannot be used as an encoder.*takes sentence, other") as caught:
        await encoder_of(model).encode_query("x")
    assert caught.value.code is ErrorCode.INVALID
    config.output.add(name="second", data_type=DataType.TYPE_FP32, dims=[1])
    del config.input[1]
    model.spec = build_spec(config, 1)
    with pytest.raises(SluiceError, match="it has vector, second"):
        await encoder_of(model).encode_query("x")


async def test_tokens_are_estimated_without_a_tokenizer() -> None:
    text = "A tokenizer, 12345 words\nand naïveté 漢字!"
    starts = await encoder_of(TextModel()).token_starts(text)
    assert starts == sorted(set(starts))
    assert {0, 2, text.index(","), text.index("and"), text.index("!")} <= set(starts)
    assert len(text.split()) < len(starts) < len(text)


# --- token states of a model with BERT's inputs


def write_states_model(root: Path, max_batch_size: int, tokenizer: str = "sentence_tokenizer") -> None:
    """Write a model whose states are (id, 1) for each token, padding included, which a mean must leave out."""
    dims = ["batch", "tokens"]
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["one", "mask"], ["padding"]),
        helper.make_node("Mul", ["padding", "far"], ["moved"]),
        helper.make_node("Add", ["ids", "moved"], ["values"]),
        helper.make_node("Sub", ["ids", "ids"], ["zeros"]),
        helper.make_node("Add", ["zeros", "one"], ["ones"]),
        helper.make_node("Unsqueeze", ["values", "last"], ["first"]),
        helper.make_node("Unsqueeze", ["ones", "last"], ["second"]),
        helper.make_node("Concat", ["first", "second"], ["last_hidden_state"], axis=-1),
    ]
    constants = [
        helper.make_tensor("one", TensorProto.FLOAT, [], [1.0]),
        helper.make_tensor("far", TensorProto.FLOAT, [], [1e6]),
        helper.make_tensor("last", TensorProto.INT64, [1], [2]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, dims) for name in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*dims, 2])]
    graph = helper.make_graph(nodes, "states", inputs, outputs, constants)
    parameter = f'parameters {{ key: "tokenizer_model" value {{ string_value: "{tokenizer}" }} }}' if tokenizer else ""
    config = f"""
    backend: "onnxruntime" max_batch_size: {max_batch_size}
    input [
      {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
      {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }}
    ]
    output [ {{ name: "last_hidden_state" data_type: TYPE_FP32 dims: [ -1, 2 ] }} ]
    {parameter}
    """
    folder = write_config(root, "states", config)
    onnx.save(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 18)]),
        folder / "1" / "model.onnx",
    )


async def test_token_states_are_averaged_without_their_padding(tmp_path: Path) -> None:
    write_states_model(copy_models(tmp_path, "sentence_tokenizer"), 8)
    async with serving(tmp_path) as models:
        encoder = TextEncoder(models, "states")
        vectors = await encoder.encode_documents(["hello world", "hi"])
        assert await encoder.dim() == 2
    means = np.array([[np.mean([101, 7592, 2088, 102]), 1], [np.mean([101, 7632, 102]), 1]])
    assert np.allclose(vectors, means / np.linalg.norm(means, axis=1, keepdims=True), atol=1e-6)


async def test_token_inputs_need_a_tokenizer(tmp_path: Path) -> None:
    write_states_model(tmp_path, 8, tokenizer="")
    async with serving(tmp_path) as models:
        with pytest.raises(SluiceError, match="'tokenizer_model'") as caught:
            await TextEncoder(models, "states").encode_query("x")
    assert caught.value.code is ErrorCode.INVALID
