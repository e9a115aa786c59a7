"""Token ids of prompts that are cut, framed or filled in, as transformers makes them."""

from typing import Any

import pytest
from tokenizers import processors
from transformers import AddedToken, PreTrainedTokenizerFast

from sluice.errors import SluiceError
from sluice.pipelines.text.tokenizer import FORMATS, Tokenizer
from sluice.pipelines.text.types import ChatMessage, Conversation, PromptForm
from tests.pipelines.text.vocabularies import byte_level

TEXT = "def add(a, b):\n    return a + b\n"
CHAT = Conversation((ChatMessage("user", "hello there"),))
CONTEXT = 64


def framed(*tokens: str) -> Any:
    """A tokenizer of transformers that puts a token before and one behind each text, and keeps a prompt's end."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="<|end|>", truncation_side="left"
    )
    made.add_tokens([AddedToken(token, special=True) for token in tokens])
    bos, eos = made.bos_token_id, made.eos_token_id
    frame = processors.TemplateProcessing(single="<s> $A <|end|>", special_tokens=[("<s>", bos), ("<|end|>", eos)])
    made.backend_tokenizer.post_processor = frame
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


async def encode(reference: Any, prompt: Any, **form: Any) -> list[int]:
    return await Tokenizer(reference).encode_prompt(prompt, PromptForm(**form), CONTEXT)


@pytest.mark.parametrize("number", [3, 7, 1000])
@pytest.mark.parametrize("adds", [True, False, None])
async def test_the_special_tokens_of_a_cut_prompt_stay(number: int, adds: bool | None) -> None:
    reference = framed()
    settings = {"add_special_tokens": adds is not False, "truncation": True, "max_length": number}
    expected = reference(TEXT, **settings)["input_ids"]
    assert await encode(reference, TEXT, truncate_prompt_tokens=number, add_special_tokens=adds) == expected


async def test_a_conversation_gets_special_tokens_on_request() -> None:
    reference = framed()
    assert await encode(reference, CHAT, add_special_tokens=True) == reference("hello there")["input_ids"]
    plain = reference("hello there", add_special_tokens=False)["input_ids"]
    assert await encode(reference, CHAT) == await encode(reference, CHAT, add_special_tokens=False) == plain


async def test_what_fits_is_the_context_less_what_is_reserved() -> None:
    ids = list(range(200))
    assert await encode(framed(), ids, truncate_prompt_tokens=-1, num_reserved=10) == ids[-(CONTEXT - 10) :]
    assert await encode(framed(), ids, truncate_prompt_tokens=-1, num_reserved=CONTEXT) == ids[-1:]


@pytest.mark.parametrize("tokens", FORMATS)
async def test_a_middle_is_asked_for_in_the_models_tokens(tokens: tuple[str, str, str]) -> None:
    reference = framed(*tokens)
    prefix, suffix, middle = tokens
    expected = reference(f"{prefix}def add({suffix}): pass{middle}")["input_ids"]
    ids = await encode(reference, "def add(", suffix="): pass")
    assert ids == expected
    assert all(ids.count(reference.convert_tokens_to_ids(token)) == 1 for token in tokens)


async def test_a_model_that_cannot_fill_in_a_middle_says_so() -> None:
    with pytest.raises(SluiceError, match="no tokens to fill in a middle with") as caught:
        await encode(framed(), "a", suffix="b")
    assert caught.value.param == "suffix"
