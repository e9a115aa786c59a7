import asyncio
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.tokenizer import INLINE_CHARS, TURN_CHARS, Tokenizer
from sluice.pipelines.text.types import ChatMessage
from tests.paths import ROOT
from tests.pipelines.text.vocabularies import byte_level

TEXTS = ["What does str.partition do?", "  two  spaces\n", "naïve 😀 漢字", "a <|end|> typed by the user", ""]


@pytest.fixture(scope="module")
def reference(rill_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(rill_path)


def made(**fields: object) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level(), **fields))


async def refusal(tokenizer: Tokenizer, *messages: ChatMessage) -> str:
    with pytest.raises(SluiceError) as caught:
        await tokenizer.encode_chat(messages)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "messages")
    return caught.value.message


@pytest.mark.parametrize("text", TEXTS)
async def test_text_is_encoded_as_transformers_does(rill: Tokenizer, reference: Any, text: str) -> None:
    assert await rill.encode_text(text) == reference(text)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
async def test_chats_are_encoded_as_transformers_does(reference: Any, text: str) -> None:
    turns = [("system", "Be brief."), ("user", text), ("assistant", "Yes."), ("user", "Why?")]
    expected = reference.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True
    )
    tokenizer = Tokenizer(reference, allows_special_tokens="<|" in text)
    assert await tokenizer.encode_chat([ChatMessage(*turn) for turn in turns]) == expected["input_ids"]


async def test_the_template_alone_writes_special_tokens_in_chats(rill_path: Path, tmp_path: Path) -> None:
    """A tokenizer that begins texts with <|bos|> must not begin chats with two."""
    tokenizer = AutoTokenizer.from_pretrained(rill_path)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 1)]
    )
    tokenizer.save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (await loaded.encode_text("hi")).count(1) == 1
    assert (await loaded.encode_chat([ChatMessage("user", "hi")])).count(1) == 1


async def test_developer_is_the_system(rill: Tokenizer) -> None:
    user = ChatMessage("user", "hi")
    assert await rill.encode_chat([ChatMessage("developer", "x"), user]) == await rill.encode_chat(
        [ChatMessage("system", "x"), user]
    )


async def test_truncation_in_the_file_does_not_cut_prompts(rill_path: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(rill_path)
    tokenizer.backend_tokenizer.enable_truncation(max_length=3)
    tokenizer.backend_tokenizer.enable_padding(length=900)
    loaded = Tokenizer(tokenizer)
    assert 3 < len(await loaded.encode_text("one two three four five six")) < 900


async def test_empty_messages_and_unknown_roles_are_refused(rill: Tokenizer) -> None:
    assert "empty" in await refusal(rill)
    message = await refusal(rill, ChatMessage("user", "hi"), ChatMessage("robot", "beep"))
    assert message == "messages[1].role is 'robot'; allowed are system, developer, user, assistant, tool, function"


async def test_a_model_without_a_template_says_what_to_do() -> None:
    assert "completions" in await refusal(made(), ChatMessage("user", "hi"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.strip() }}", "has no element 5"),
        ("{{ 1 + messages }}", "unsupported operand"),
    ],
)
async def test_the_error_has_the_templates_reason(template: str, reason: str) -> None:
    assert reason in await refusal(made(chat_template=template), ChatMessage("user", "hi"))


async def test_half_a_surrogate_pair_is_refused(rill: Tokenizer) -> None:
    with pytest.raises(SluiceError, match="surrogate") as caught:
        await rill.encode_text("a\ud83d")
    assert caught.value.param == "prompt"
    assert "surrogate" in await refusal(rill, ChatMessage("user", "a\ud83d"))


MOST_INLINE = INLINE_CHARS - 2 * TURN_CHARS


@pytest.mark.parametrize(("num_chars", "is_inline"), [(MOST_INLINE, True), (MOST_INLINE + 1, False)])
async def test_long_text_leaves_the_event_loop_free(
    num_chars: int, is_inline: bool, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    find, tokenizer = reference.get_chat_template, Tokenizer(reference)

    def watched(*args: object, **kwargs: object) -> object:
        threads.append(threading.current_thread())
        return find(*args, **kwargs)

    monkeypatch.setattr(reference, "get_chat_template", watched)
    half = ChatMessage("user", "x" * (num_chars // 2))
    await tokenizer.encode_chat([half, ChatMessage("user", "x" * (num_chars - num_chars // 2))])
    assert [thread is threading.main_thread() for thread in threads] == [is_inline]


async def test_many_threads_may_encode_at_once(rill: Tokenizer) -> None:
    texts = [f"{i} partition splits the string at the separator. " * 100 for i in range(24)]
    assert len(texts[0]) > INLINE_CHARS
    alone = [await rill.encode_text(text) for text in texts]
    assert list(await asyncio.gather(*map(rill.encode_text, texts))) == alone


@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed, so nothing could import it")
def test_an_installed_torch_is_left_alone() -> None:
    script = (
        "import sys, pathlib, sluice.pipelines.text.tokenizer as t; t.Tokenizer.load(pathlib.Path(sys.argv[1]));"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, ROOT / "models" / "rill" / "1"], check=True)


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_directory_without_a_usable_tokenizer_is_refused(
    rill_path: Path, tmp_path: Path, content: str | None
) -> None:
    shutil.copy(rill_path / "config.json", tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SluiceError, match=str(tmp_path)) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_a_path_that_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="not a directory"):
        Tokenizer.load(tmp_path / "missing")


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(SluiceError, match=r"has no tokenizer; one of these is needed: tokenizer\.json"):
        Tokenizer.load(tmp_path)
