"""The tokenizer backend, loaded as the repository loads it."""

import asyncio
import re
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import tokenizers

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.stages.tokenizer_model import TextTokenizer, split_text
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Array, Tensor
from tests.paths import MODELS
from tests.pipelines.rag.bundled import context, copy_models, serving, write_config

on_one_loop = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = MODELS / "sentence_tokenizer" / "1" / "tokenizer.json"
HELLO_WORLD = [101, 7592, 2088, 102]
OUTPUTS = """
output [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "token_type_ids" data_type: TYPE_INT64 dims: [ -1 ] }
]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bundled(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    async with serving(copy_models(tmp_path_factory.mktemp("models"), "sentence_tokenizer")) as repository:
        yield repository.find("sentence_tokenizer")


@cache
def tokenizer_of(max_tokens: int) -> TextTokenizer:
    """The bundled tokenizer, whose vocabulary takes long to read."""
    return TextTokenizer.load(TOKENIZER, max_tokens=max_tokens)


def write_tokenizer(root: Path, config: str, content: str | None = None) -> Path:
    folder = write_config(root, "words", f'backend: "tokenizer"\n{config}')
    (folder / "1" / "tokenizer.json").write_text(TOKENIZER.read_text() if content is None else content)
    return root


def request(*texts: bytes, is_batched: bool = True, outputs: tuple[str, ...] = ()) -> InferRequest:
    array = np.empty((len(texts), 1) if is_batched else (len(texts),), np.object_)
    array.ravel()[:] = texts
    return InferRequest({"text": Tensor("text", "BYTES", array.shape, array=array)}, requested_outputs=outputs)


async def answer(model: Model, *texts: bytes, is_batched: bool = True) -> dict[str, Array]:
    response = await infer_one(model, request(*texts, is_batched=is_batched))
    return {each.name: each.array for each in response.outputs}


@on_one_loop
async def test_a_text_becomes_its_ids_without_padding(bundled: Model) -> None:
    found = await answer(bundled, b"Hello world")
    assert found["input_ids"].tolist() == [HELLO_WORLD] and found["input_ids"].dtype == np.int64
    assert (await answer(bundled, b""))["input_ids"].tolist() == [[101, 102]]


@on_one_loop
async def test_rows_are_filled_up_at_their_ends(bundled: Model) -> None:
    found = await answer(bundled, b"Hello world", b"", b"hi")
    assert found["input_ids"].tolist() == [HELLO_WORLD, [101, 102, 0, 0], [101, 7632, 102, 0]]


@on_one_loop
async def test_long_texts_are_cut_off_the_loop_and_others_are_answered_meanwhile(bundled: Model) -> None:
    order: list[str] = []

    async def ask(name: str, text: bytes) -> Array:
        ids = (await answer(bundled, text))["input_ids"]
        order.append(name)
        return ids

    long, _ = await asyncio.gather(ask("long", b"word " * 20_000), ask("short", b"hi"))
    assert order == ["short", "long"]
    assert long.shape == (1, 256)
    assert long[0, 0] == 101 and long[0, -1] == 102


@on_one_loop
async def test_bytes_that_are_no_text_are_refused(bundled: Model) -> None:
    with pytest.raises(SluiceError, match="not UTF-8") as caught:
        await answer(bundled, b"fine", b"\xff\xfe")
    assert caught.value.code is ErrorCode.INVALID
    assert "sentence_tokenizer" in caught.value.message
    assert bundled.num_in_flight == 0


@on_one_loop
async def test_statistics_count_rows(bundled: Model) -> None:
    before = bundled.statistics.inference_count, bundled.statistics.execution_count
    await answer(bundled, b"one", b"two")
    after = bundled.statistics.inference_count, bundled.statistics.execution_count
    assert (after[0] - before[0], after[1] - before[1]) == (2, 1)


async def test_unloading_ends_what_waits(tmp_path: Path) -> None:
    async with serving(copy_models(tmp_path, "sentence_tokenizer")) as repository:
        model = repository.find("sentence_tokenizer")
        waiting = [asyncio.create_task(answer(model, b"word " * 20_000)) for _ in range(6)]
        await asyncio.sleep(0)
        await model.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
    failed = [each for each in results if isinstance(each, SluiceError)]
    assert failed and all(each.code is ErrorCode.UNAVAILABLE for each in failed)
    assert model.is_idle


async def test_masks_types_and_parameters(tmp_path: Path) -> None:
    parameters = """
    parameters { key: "add_special_tokens" value { string_value: "false" } }
    parameters { key: "prefix" value { string_value: "hello " } }
    parameters { key: "max_tokens" value { string_value: "3" } }
    """
    async with serving(write_tokenizer(tmp_path, f"max_batch_size: 4 {OUTPUTS} {parameters}")) as repository:
        model = repository.find("words")
        found = await answer(model, b"world", b"hi hi hi hi")
        only = await infer_one(model, request(b"x", outputs=("attention_mask",)))
    assert found["input_ids"].tolist() == [[7592, 2088, 0], [7592, 7632, 7632]]
    assert found["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]] and found["attention_mask"].dtype == np.int32
    assert not found["token_type_ids"].any()
    assert [each.name for each in only.outputs] == ["attention_mask"]


async def test_without_a_batch_dimension_and_with_completed_tensors(tmp_path: Path) -> None:
    async with serving(write_tokenizer(tmp_path, "")) as repository:
        found = await answer(repository.find("words"), b"Hello world", is_batched=False)
    assert found["input_ids"].tolist() == HELLO_WORLD


@pytest.mark.parametrize(
    ("config", "content", "expected"),
    [
        ('parameters { key: "max_tokens" value { string_value: "many" } }', None, "'max_tokens'.*must be an integer"),
        ('parameters { key: "max_token" value { string_value: "5" } }', None, "no parameter 'max_token'"),
        ('parameters { key: "add_special_tokens" value { string_value: "maybe" } }', None, "one of true, false"),
        ('output { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }', None, "'ids' is not"),
        ('input { name: "text" data_type: TYPE_FP32 dims: [ 1 ] }', None, "TYPE_STRING"),
        ("", "{}", "cannot load the tokenizer"),
    ],
)
async def test_what_cannot_be_loaded_says_why(tmp_path: Path, config: str, content: str | None, expected: str) -> None:
    write_tokenizer(tmp_path, config, content)
    repository = ModelRepository([tmp_path], ControlMode.NONE, context)
    failures = await repository.start()
    await repository.close()
    assert re.search(expected, failures["words"].message), failures["words"].message


@pytest.mark.parametrize("text", ["", "one two  three\nfour", "naïve 漢字 🙂 test", "x" * 60_000, "ab cd\n" * 10_000])
def test_starts_are_those_of_the_whole_text(text: str) -> None:
    starts = list(tokenizer_of(16).starts(text))
    assert starts == sorted(starts)
    assert all(0 <= start < len(text) and not text[start].isspace() for start in starts)
    if len(text) < 50_000:
        whole = tokenizers.Tokenizer.from_file(str(TOKENIZER))
        whole.no_padding()
        whole.no_truncation()
        assert starts == [start for start, _ in whole.encode(text, add_special_tokens=False).offsets]
    elif " " in text:
        assert len(starts) == 2 * 10_000


def test_pieces_make_up_the_text_and_end_behind_white_space() -> None:
    text = "aaa bbb ccc ddddddddddddddd e"
    pieces = [text[start:end] for start, end in split_text(text, 8)]
    assert "".join(pieces) == text
    assert pieces == ["aaa bbb ", "ccc ", "dddddddd", "ddddddd ", "e"]


@pytest.mark.parametrize(
    "text", ["word " * 12_000, " " * 60_000 + "hello world", "x" * 60_000 + " hello world", "日本語" * 17_000]
)
def test_what_is_kept_of_a_very_long_text_is_the_same(text: str) -> None:
    assert tokenizer_of(16).encode_long([text]) == tokenizer_of(16).encode([text])


def test_of_a_very_long_text_the_beginning_is_tokenized_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of all of it take seconds and gigabytes, to be thrown away."""
    taken = []
    tokenize = TextTokenizer._unlocked

    def watched(tokenizer: tokenizers.Tokenizer, text: str, *, adds_special: bool) -> tokenizers.Encoding:
        taken.append(len(text))
        return tokenize(tokenizer, text, adds_special=adds_special)

    monkeypatch.setattr(TextTokenizer, "_unlocked", staticmethod(watched))
    tokenizer_of(16).encode_long(["word " * 200_000])
    assert taken == [50_000]
