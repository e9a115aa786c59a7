"""Rerankers that are real models: one in Python that sees texts, one in ONNX that sees tokens."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.encoding.reranker import LlmReranker, ModelReranker, PairTokenizer
from sluice.pipelines.llm.text import LlmText
from sluice.serving.model import Model
from tests.serving.backends.builders import Lookup
from tests.serving.backends.onnxruntime import parts as onnx_parts
from tests.serving.backends.python.parts import loaded, write_model

PASSAGES = ["one", "two words", "now three words"]

TEXTS = """
input { name: "query" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "documents" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] }
"""
CODE = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        query = pb_utils.get_input_tensor_by_name(request, "query").as_numpy()
        documents = pb_utils.get_input_tensor_by_name(request, "documents").as_numpy()
        question = query.ravel()[0].decode()
        if question == "fail":
            raise ValueError("no scores today")
        scores = np.array([len(each.split()) for each in documents.ravel()], np.float32).reshape(documents.shape)
        if question == "few":
            scores = scores[..., 1:]
        if question == "nan":
            scores = scores * np.nan
        return pb_utils.InferenceResponse([pb_utils.Tensor("scores", scores)])
"""


@pytest.fixture(params=[0, 8], ids=["alone", "batching"])
async def lookup(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lookup]:
    """A lookup with the model `ranker`, which prefers long passages."""
    lookup = Lookup()
    async with loaded(write_model(tmp_path / "ranker", CODE, f"max_batch_size: {request.param}{TEXTS}"), lookup):
        yield lookup


async def test_a_model_scores_texts(lookup: Lookup) -> None:
    reranker = ModelReranker(lookup, "ranker")
    assert await reranker.scores("which?", PASSAGES) == [1.0, 2.0, 3.0]
    assert await reranker.scores("which?", []) == []
    for question, fault in (
        ("fail", "no scores today"),
        ("few", "it gave 2 scores for 3 passages"),
        ("nan", "it gave a score that is no number"),
    ):
        with pytest.raises(SluiceError, match=f"reranker 'ranker': .*{fault}") as caught:
            await reranker.scores(question, PASSAGES)
        assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(SluiceError, match=r"reranker 'ranker': .*unknown model") as caught:
        await ModelReranker(Lookup(), "ranker").scores("?", PASSAGES)
    assert caught.value.code is ErrorCode.UNAVAILABLE


# -- cross-encoders


def write_tokenizer(path: Path) -> Path:
    """Every word is a token; question and passage stand between special ones and have types of their own."""
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "?": 3, "one": 4, "two": 5, "three": 6, "words": 7, "now": 8}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def cross_encoder(*, has_types: bool = True) -> ModelProto:
    """Build a model that scores by the passage's tokens: the sum of types if it takes them, else of the mask."""
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]
    counted = "token_type_ids" if has_types else "attention_mask"
    nodes = [
        helper.make_node("Mul", [counted, "attention_mask"], ["counted"]),
        helper.make_node("Cast", ["counted"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["ids", "ids"], ["nothing"]),
        helper.make_node("Add", ["numbers", "nothing"], ["both"]),
        helper.make_node("ReduceSum", ["both", "axis"], ["logits"], keepdims=1),
    ]
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    inputs = [onnx_parts.value(name, ["n", "s"], onnx_parts.INT64) for name in names]
    return onnx_parts.graph(nodes, inputs, [onnx_parts.value("logits", ["n", 1])], [axis])


def lookup_of(model: Model) -> Lookup:
    lookup = Lookup()
    lookup.models["cross"] = model
    return lookup


@pytest.mark.parametrize("text", ["max_batch_size: 8", "max_batch_size: 2"])
@pytest.mark.parametrize("has_types", [True, False])
async def test_a_cross_encoder_scores_pairs_of_tokens(tmp_path: Path, text: str, has_types: bool) -> None:
    model = await onnx_parts.load(tmp_path, cross_encoder(has_types=has_types), text)
    reranker = ModelReranker(lookup_of(model), "cross", PairTokenizer.load(write_tokenizer(tmp_path)))
    others = 0 if has_types else 3  # [CLS], the question's word and [SEP]
    assert await reranker.scores("one", PASSAGES) == [2.0 + others, 3.0 + others, 4.0 + others]
    await model.close()


class ScoringText:
    """The text model of an engine that scores a pair by its length and the place of its second text."""

    info = SimpleNamespace(max_num_seqs=2)
    num_running = most_running = 0

    async def hidden_states(self, token_ids: list[int], *, second_text_start: int) -> Any:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        return np.array([[len(token_ids) + second_text_start / 100]], np.float32)


async def test_an_engine_scores_pairs_side_by_side(tmp_path: Path) -> None:
    text, library = ScoringText(), Tokenizer.from_file(str(write_tokenizer(tmp_path) / "tokenizer.json"))
    reranker = LlmReranker(cast(LlmText, text), PairTokenizer(library, 6))
    found = await reranker.score("one", [*PASSAGES, "two " * 100])
    assert found.values == pytest.approx([5.03, 6.03, 6.03, 6.03])  # at most 6 tokens, the second text from 3
    assert found.num_tokens == 23 and text.most_running == 2


async def test_long_pairs_are_cut_to_what_the_tokenizer_says(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(path))
    rows = await PairTokenizer.load(path).encode("one", ["two " * 100, "two"])
    assert [len(row.ids) for row in rows] == [16, 5]


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match=r"cannot load the reranker's tokenizer .*tokenizer.json") as caught:
        PairTokenizer.load(tmp_path)
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNAVAILABLE, "reranker_tokenizer")
