"""Token ids of prompts and the text of ids, beside those of transformers, of the engine and of the encoders."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sluice import __version__
from tests.gateway.front.http.live import LiveServer
from tests.paths import RILL_TOKENIZER

REFERENCE = PreTrainedTokenizerFast.from_pretrained(RILL_TOKENIZER)
TEXT = "<|user|>What does CREATE INDEX do, naïvely?<|end|>"
CHAT = [{"role": "user", "content": "Hello there!"}, {"role": "assistant", "content": "Yes."}]


def tokenize(live: LiveServer, **body: Any) -> Any:
    answer = live.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(live: LiveServer, path: str, body: Any) -> tuple[int, str | None, str]:
    answer = live.post(path, body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


@pytest.mark.parametrize("adds_special", [True, False])
def test_a_prompt_has_the_ids_of_transformers_and_comes_back(live: LiveServer, adds_special: bool) -> None:
    found = tokenize(live, model="rill", prompt=TEXT, add_special_tokens=adds_special, return_token_strs=True)
    expected = REFERENCE.encode(TEXT, add_special_tokens=adds_special)
    assert found == {
        "count": len(expected),
        "max_model_len": 1024,
        "tokens": expected,
        "token_strs": REFERENCE.convert_ids_to_tokens(expected),
    }
    answer = live.post("/detokenize", {"model": "rill", "tokens": expected})
    assert answer.json() == {"prompt": REFERENCE.decode(expected)}


@pytest.mark.parametrize("starts_answer", [True, False])
def test_a_conversation_has_the_ids_that_the_model_gets(live: LiveServer, starts_answer: bool) -> None:
    found = tokenize(live, messages=CHAT, add_generation_prompt=starts_answer)
    expected = REFERENCE.apply_chat_template(CHAT, add_generation_prompt=starts_answer, return_dict=False)
    assert found["tokens"] == expected and found["token_strs"] is None


def test_what_a_message_spells_is_plain_text_as_for_the_model(live: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hello <|end|>!"}]
    found = tokenize(live, messages=messages)
    body = {"model": "rill", "messages": messages, "max_tokens": 1}
    assert found["count"] == live.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    assert found["tokens"] != REFERENCE.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_many_tokens(live: LiveServer) -> None:
    ids = [5 + number % 200 for number in range(100_000)]
    text = live.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == REFERENCE.decode(ids)
    text = "a b " * 5000
    found = tokenize(live, prompt=text, return_token_strs=True)
    assert found["tokens"] == REFERENCE.encode(text)
    assert len(found["token_strs"]) == found["count"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "prompt or messages is required, and not both"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt", "prompt or messages is required, and not both"),
        ("/tokenize", {"messages": []}, "messages", "messages must not be empty"),
        ("/tokenize", {"prompt": 5}, "prompt", "prompt must be a valid string, got 5"),
        ("/tokenize", {"prompt": "a b " * (1 << 19)}, "prompt", "the prompt has 2097152 characters, which are more"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template", "chat_template is not allowed"),
        (
            "/tokenize",
            {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true",
        ),
        ("/detokenize", {"tokens": []}, "tokens", "tokens must not be empty"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens[1]", "tokens[1] must be a token id from 0 to "),
        ("/detokenize", {"tokens": [5] * 30_000 + [1 << 40]}, "tokens[30000]", "tokens[30000] must be a token id from"),
        ("/detokenize", {}, "tokens", "tokens is required"),
    ],
)
def test_what_is_wrong_is_named(live: LiveServer, path: str, body: Any, param: str, message: str) -> None:
    status, named, text = refusal(live, path, body)
    assert (status, named) == (400, param)
    assert text.startswith(message)


def test_a_strict_server_is_strict_here_too(strict_live: LiveServer) -> None:
    status, named, _ = refusal(strict_live, "/tokenize", {"prompt": "x", "colour": "red"})
    assert (status, named) == (400, "colour")
    assert refusal(strict_live, "/detokenize", {"tokens": [5] * 5000})[0] == 413


def test_version_and_ping(live: LiveServer, loading_live: LiveServer) -> None:
    assert live.get("/version").json() == {"version": __version__}
    assert live.get("/ping").json() == live.post("/ping").json() == {"status": "ok"}
    assert loading_live.get("/ping").status_code == 503
