"""The native postprocessing."""

from pathlib import Path

import pytest

from sluice.errors import SluiceError
from sluice.pipelines.stages.backend import PostprocessingBackend
from sluice.pipelines.text.tokenizer import INLINE_CHARS, Tokenizer
from sluice.serving.model import Model
from tests.pipelines.stages.parts import arrays, config_of, load

CONFIG = 'name: "postprocessing" backend: "postprocessing" max_batch_size: 4'


async def stage(rill_path: Path, text: str = CONFIG, **parameters: str) -> Model:
    return await load(PostprocessingBackend(), rill_path, config_of(text, tokenizer_dir=str(rill_path), **parameters))


@pytest.fixture
def ids(rill: Tokenizer) -> list[int]:
    return rill.encode_words("A river runs", "text")


async def test_rows_and_beams_are_one_dimension_as_in_nvidias_stage(rill_path: Path, ids: list[int]) -> None:
    model = await stage(rill_path)
    length = len(ids)
    tokens = [[ids, ids], [ids, ids]]
    found = await arrays(model, TOKENS_BATCH=tokens, SEQUENCE_LENGTH=[[length, 1], [0, length]])
    assert found["OUTPUT"].tolist() == [b"A river runs", b"A", b"", b"A river runs"]


OLDER = """
input { name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [-1, -1] }
input { name: "SEQUENCE_LENGTH" data_type: TYPE_INT32 dims: -1 }
input { name: "CUM_LOG_PROBS" data_type: TYPE_FP32 dims: -1 optional: true }
input { name: "CONTEXT_LOGITS" data_type: TYPE_FP32 dims: [-1, -1] optional: true }
output { name: "OUTPUT" data_type: TYPE_STRING dims: -1 }
output { name: "OUT_CUM_LOG_PROBS" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT_CONTEXT_LOGITS" data_type: TYPE_FP32 dims: [-1, -1] }
"""


async def test_older_ensembles_hand_log_probabilities_through(rill_path: Path, ids: list[int]) -> None:
    model = await stage(rill_path, CONFIG + OLDER)
    found = await arrays(model, TOKENS_BATCH=[[ids]], SEQUENCE_LENGTH=[[1]], CUM_LOG_PROBS=[[-1.5]])
    assert {name: array.tolist() for name, array in found.items()} == {
        "OUTPUT": [b"A"],
        "OUT_CUM_LOG_PROBS": [[-1.5]],
    }


async def test_nothing_to_say(rill_path: Path) -> None:
    model = await stage(rill_path)
    assert (await arrays(model, TOKENS_BATCH=[[[]]], SEQUENCE_LENGTH=[[0]]))["OUTPUT"].tolist() == [b""]


@pytest.mark.parametrize(("value", "end"), [("${skip_special_tokens}", b""), ("False", b"<|end|>"), ("1", b"")])
async def test_special_tokens(rill_path: Path, rill: Tokenizer, ids: list[int], value: str, end: bytes) -> None:
    model = await stage(rill_path, skip_special_tokens=value)
    found = await arrays(model, TOKENS_BATCH=[[[*ids, rill.eos_token_id]]], SEQUENCE_LENGTH=[[len(ids) + 1]])
    assert found["OUTPUT"].tolist() == [b"A river runs" + end]


async def test_many_tokens_and_no_batch_dimension(rill_path: Path, ids: list[int]) -> None:
    model = await stage(rill_path, CONFIG.replace("4", "0"))
    many = ids * INLINE_CHARS
    found = await arrays(model, TOKENS_BATCH=[many], SEQUENCE_LENGTH=[len(many)])
    assert found["OUTPUT"].tolist() == [b"A river runs" * INLINE_CHARS]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([[[1, 2]]], [[3]], "must be between 0 and the 2 tokens of TOKENS_BATCH"),
        ([[[1, 2]]], [[-1]], "must be between 0 and the 2 tokens of TOKENS_BATCH"),
        ([[[1, 2]]], [[1, 1]], "must have a length for each sequence"),
        ([[[1, -2]]], [[2]], "'TOKENS_BATCH' must hold token ids, got -2"),
    ],
)
async def test_wrong_sequences(rill_path: Path, tokens: object, lengths: object, message: str) -> None:
    model = await stage(rill_path)
    with pytest.raises(SluiceError, match=message):
        await arrays(model, TOKENS_BATCH=tokens, SEQUENCE_LENGTH=lengths)
