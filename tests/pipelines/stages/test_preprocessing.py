"""The native preprocessing: NVIDIA's tensors, our tokenizer."""

from pathlib import Path

import numpy as np
import pytest

from sluice.errors import SluiceError
from sluice.pipelines.stages.backend import PreprocessingBackend
from sluice.pipelines.text.tokenizer import INLINE_CHARS, Tokenizer
from sluice.serving.model import Model
from tests.pipelines.stages.parts import arrays, config_of, load

CONFIG = 'name: "preprocessing" backend: "preprocessing" max_batch_size: 4 '


async def stage(rill_path: Path, text: str = CONFIG, **parameters: str) -> Model:
    return await load(PreprocessingBackend(), rill_path, config_of(text, **{"tokenizer_dir": ".", **parameters}))


async def test_prompts_are_filled_up_to_the_longest(rill_path: Path, rill: Tokenizer) -> None:
    texts = ["A river", "A river runs to the sea"]
    ids = [rill.encode(text, "text", add_special_tokens=True) for text in texts]
    model = await stage(rill_path)
    found = await arrays(model, QUERY=[[text] for text in texts], REQUEST_OUTPUT_LEN=[[5], [6]])
    assert found["REQUEST_INPUT_LEN"].tolist() == [[len(row)] for row in ids]
    assert found["INPUT_ID"].tolist() == [ids[0] + [rill.pad_token_id] * (len(ids[1]) - len(ids[0])), ids[1]]
    assert found["REQUEST_OUTPUT_LEN"].tolist() == [[5], [6]]
    assert found["OUT_END_ID"].tolist() == [[rill.eos_token_id]] * 2
    assert found["OUT_PAD_ID"].tolist() == found["DECODER_INPUT_ID"].tolist() == [[rill.pad_token_id]] * 2
    assert found["REQUEST_DECODER_INPUT_LEN"].tolist() == [[1], [1]]
    assert found["BAD_WORDS_IDS"].shape == found["STOP_WORDS_IDS"].shape == (2, 2, 0)
    assert found["EMBEDDING_BIAS"].shape == (2, 0)


@pytest.mark.parametrize(("value", "adds"), [("${add_special_tokens}", True), ("", True), ("T", True), ("no", False)])
async def test_special_tokens(rill_path: Path, rill: Tokenizer, value: str, adds: bool) -> None:
    model = await stage(rill_path, add_special_tokens=value)
    found = await arrays(model, QUERY=[["A river"]], REQUEST_OUTPUT_LEN=[[1]])
    assert found["INPUT_ID"].tolist() == [rill.encode("A river", "text", add_special_tokens=adds)]


async def test_what_the_client_says_of_ends_holds(rill_path: Path) -> None:
    model = await stage(rill_path)
    found = await arrays(model, QUERY=[["A"]], REQUEST_OUTPUT_LEN=[[1]], END_ID=[[-1]], PAD_ID=[[9]])
    assert (found["OUT_END_ID"].tolist(), found["OUT_PAD_ID"].tolist()) == ([[-1]], [[9]])


async def test_words_end_to_end_and_where_each_ends(rill_path: Path, rill: Tokenizer) -> None:
    def spelled(text: str) -> list[int]:
        return rill.encode_words(text, "text")

    model = await stage(rill_path)
    given = [["", "river", "\n\n"], [" sea", "", ""]]
    found = await arrays(model, QUERY=[["A"]] * 2, REQUEST_OUTPUT_LEN=[[1]] * 2, STOP_WORDS_DICT=given)
    first = [spelled("river"), spelled(" river"), spelled("\n\n")]
    flat, ends = found["STOP_WORDS_IDS"][0].tolist()
    assert flat == [token_id for word in first for token_id in word]
    assert ends == [*np.cumsum([len(word) for word in first]), *[-1] * (len(flat) - 3)]
    flat, ends = found["STOP_WORDS_IDS"][1].tolist()
    assert flat[: len(spelled(" sea"))] == spelled(" sea")
    assert [end for end in ends if end != -1] == [len(spelled(" sea"))]


async def test_biases_of_words(rill_path: Path, rill: Tokenizer) -> None:
    model = await stage(rill_path)
    fields = {"QUERY": [["A"]], "REQUEST_OUTPUT_LEN": [[1]], "EMBEDDING_BIAS_WORDS": [["river", "a"]]}
    found = await arrays(model, **fields, EMBEDDING_BIAS_WEIGHTS=[[1.5, -2.0]])
    expected = np.zeros(rill.num_tokens, np.float32)
    for word, weight in (("river", 1.5), ("a", -2.0)):
        np.add.at(expected, rill.encode_words(word, "word"), weight)
    assert (found["EMBEDDING_BIAS"] == expected).all()
    with pytest.raises(SluiceError, match="'EMBEDDING_BIAS_WEIGHTS' has 1 elements for the 2 of EMBEDDING_BIAS_WORDS"):
        await arrays(model, **fields, EMBEDDING_BIAS_WEIGHTS=[[1.5]])


async def test_long_prompts_and_decoder_prompts(rill_path: Path, rill: Tokenizer) -> None:
    text = "A river runs. " * (INLINE_CHARS // 8)
    model = await stage(rill_path)
    found = await arrays(model, QUERY=[[text]], DECODER_QUERY=[["to the sea"]], REQUEST_OUTPUT_LEN=[[1]])
    assert found["INPUT_ID"].tolist() == [rill.encode(text, "text", add_special_tokens=True)]
    assert found["DECODER_INPUT_ID"].tolist() == [rill.encode("to the sea", "text", add_special_tokens=True)]


async def test_without_a_batch_dimension(rill_path: Path, rill: Tokenizer) -> None:
    model = await stage(rill_path, CONFIG.replace("4", "0"))
    found = await arrays(model, QUERY=["A river"], REQUEST_OUTPUT_LEN=[1], STOP_WORDS_DICT=["a"])
    assert found["INPUT_ID"].tolist() == rill.encode("A river", "text", add_special_tokens=True)
    assert found["REQUEST_OUTPUT_LEN"].tolist() == [1]
    assert found["STOP_WORDS_IDS"].ndim == 2


PICTURES = (
    CONFIG
    + """
input { name: "QUERY" data_type: TYPE_STRING dims: 1 }
input { name: "REQUEST_OUTPUT_LEN" data_type: TYPE_INT32 dims: 1 }
input { name: "IMAGE_BYTES" data_type: TYPE_UINT8 dims: [-1, -1, -1, -1] optional: true }
input { name: "PROMPT_TABLE_EXTRA_ID" data_type: TYPE_UINT64 dims: 1 optional: true }
output { name: "INPUT_ID" data_type: TYPE_INT32 dims: -1 }
output { name: "PIXEL_VALUES" data_type: TYPE_FP16 dims: [-1, -1, -1, -1] }
"""
)


async def test_pictures_may_be_declared_and_not_sent(rill_path: Path) -> None:
    model = await stage(rill_path, PICTURES)
    fields = {"QUERY": [["A"]], "REQUEST_OUTPUT_LEN": [[1]]}
    assert [*await arrays(model, **fields, PROMPT_TABLE_EXTRA_ID=[[0]])] == ["INPUT_ID"]
    with pytest.raises(SluiceError, match="input 'IMAGE_BYTES' is not supported; leave it out"):
        await arrays(model, **fields, IMAGE_BYTES=np.zeros((1, 1, 2, 2, 3)))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tokenizer_dir": "${tokenizer_dir}"}, "needs the parameter 'tokenizer_dir'"),
        ({"tokenizer_dir": "nowhere"}, "nowhere: it is not a directory"),
        ({"add_special_tokens": "perhaps"}, "'add_special_tokens' .* must be true or false, got 'perhaps'"),
        ({"multimodal_model_path": "/eyes"}, "parameter 'multimodal_model_path' .* is not supported"),
    ],
)
async def test_wrong_parameters(rill_path: Path, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(SluiceError, match=message):
        await stage(rill_path, **parameters)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ('input { name: "QUESTION" data_type: TYPE_STRING dims: 1 }', "declares the input 'QUESTION'"),
        ('input { name: "QUERY" data_type: TYPE_INT32 dims: 1 }', "input 'QUERY' .* must be of type BYTES"),
        ('input { name: "QUERY" data_type: TYPE_STRING dims: 1 }', "must declare the input 'REQUEST_OUTPUT_LEN'"),
    ],
)
async def test_other_tensors(rill_path: Path, tensors: str, message: str) -> None:
    with pytest.raises(SluiceError, match=message):
        await stage(rill_path, CONFIG + tensors)
