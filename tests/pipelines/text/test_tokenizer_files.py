"""Tokenizers that come without a tokenizer.json: transformers makes them of what there is."""

import base64
import json
import sys
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken
from transformers import AutoTokenizer, ByT5Tokenizer

from sluice.errors import SluiceError
from sluice.pipelines.text.tokenizer import Tokenizer
from tests.pipelines.text.vocabularies import LINES, byte_level

TEXTS = [*LINES, "a <|end|> typed by the user", " two  spaces\n", ""]


def write(folder: Path, model_type: str, tokenizer_class: str, **fields: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class, **fields}))


def sentence_piece(folder: Path) -> None:
    write(folder, "llama", "LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )


def vocabulary_and_merges(folder: Path, tokenizer_class: str = "GPT2Tokenizer") -> None:
    write(folder, "gpt2", tokenizer_class, eos_token="<|end|>", unk_token="<|end|>")
    model = json.loads(byte_level().to_str())["model"]
    vocabulary = model["vocab"] | {"<|end|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")


def tiktoken(folder: Path) -> None:
    write(folder, "llama", "PreTrainedTokenizerFast")
    ranks = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" t", b" the"]
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(ranks)]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines))


def python_only(folder: Path) -> None:
    vocabulary_and_merges(folder, "CTRLTokenizer")


@pytest.mark.parametrize("make", [sentence_piece, vocabulary_and_merges, tiktoken, python_only])
async def test_text_goes_there_and_back_as_transformers_has_it(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path)
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    assert reference.is_fast == (make is not python_only)
    for text in TEXTS:
        ids = await tokenizer.encode_text(text)
        assert ids == reference(text)["input_ids"]
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.feed([token_id]) for token_id in ids]
        expected = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pieces) + detokenizer.flush() == expected


@pytest.mark.parametrize("library", ["sentencepiece", "tiktoken"])
def test_a_library_that_is_missing_is_named(tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence_piece(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SluiceError, match=rf"needs {library}, .* pip install 'sluice\[tokenizers\]'"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("step", [1, 2, 7])
async def test_a_tokenizer_of_bytes_in_python_streams_whole_characters(step: int) -> None:
    reference = ByT5Tokenizer()
    tokenizer = Tokenizer(reference)
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        assert (await tokenizer.encode_text(text)) == reference.encode(text)
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.feed(ids[start : start + step]) for start in range(0, len(ids), step)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + detokenizer.flush() == text
    assert tokenizer.token_texts[reference.encode("n")[0]].text == "n"
    assert tokenizer.detokenizer().feed([100_000]) == ""


async def test_added_tokens_are_one_token_each(rill_path: Path, tmp_path: Path) -> None:
    """Also those that stand in tokenizer_config.json or were added after training."""
    reference = AutoTokenizer.from_pretrained(rill_path)
    reference.add_tokens([AddedToken("<tool>", special=False)])
    reference.add_special_tokens({"additional_special_tokens": ["<|think|>"]})
    reference.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ids = await tokenizer.encode_text("a<tool>b<|think|>c")
    assert ids == reference("a<tool>b<|think|>c")["input_ids"]
    assert {reference.convert_tokens_to_ids("<tool>"), reference.convert_tokens_to_ids("<|think|>")} <= set(ids)
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.feed(ids) + detokenizer.flush() == "a<tool>bc"
