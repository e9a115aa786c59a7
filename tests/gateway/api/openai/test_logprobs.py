"""Log probabilities in OpenAI's and vLLM's shapes, whole and streamed."""

import math
from typing import Any

import openai
import pytest

from sluice.gateway.api.openai.reply import completion_logprobs
from sluice.pipelines.text.types import TextLogprob, TokenText
from tests.gateway.front.http.live import LiveServer
from tests.gateway.front.http.sse import events_of

MESSAGES: Any = [{"role": "user", "content": "Count, please."}]
CHAT: dict[str, Any] = {"model": "rill", "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
TEXT: dict[str, Any] = {"model": "rill", "prompt": "Count, please.", "max_tokens": 30, "temperature": 0}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
LIKELIEST = -math.log1p(4095 / math.e)
"""The runner gives its token a logit of 1 and the 4095 others 0."""


@pytest.mark.stand_in
def test_chat_has_openai_s_shape(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="rill", messages=MESSAGES, max_tokens=30, temperature=0, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 30
    for entry in choice.logprobs.content:
        assert entry.logprob == pytest.approx(LIKELIEST, rel=1e-5)
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert [len(entry.top_logprobs), entry.top_logprobs[0].token] == [3, entry.token]
        assert entry.top_logprobs[1].logprob == pytest.approx(LIKELIEST - 1, rel=1e-5)
    spelled = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content


def test_chat_without_top_logprobs_tells_of_no_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="rill", messages=MESSAGES, max_tokens=2, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content or ()] == [[], []]


@pytest.mark.parametrize("stop", [None, "chosen"])
def test_a_chat_stream_tells_what_the_whole_answer_tells(live: LiveServer, stop: str | None) -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    if stop is not None:
        text = live.post(CHAT_PATH, body).json()["choices"][0]["message"]["content"]
        body |= {"stop": text[25:29]}
    whole = live.post(CHAT_PATH, body).json()["choices"][0]
    *events, _ = events_of(live.post(CHAT_PATH, body | {"stream": True}).content)
    choices = [event["choices"][0] for event in events]
    told = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert told == whole["logprobs"]["content"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    if stop is not None:
        spelled = b"".join(bytes(entry["bytes"]) for entry in told[:-1]).decode(errors="replace")
        assert whole["message"]["content"].startswith(spelled)
        assert len(spelled) < len(whole["message"]["content"]), "the last entry's text was cut off whole"


@pytest.mark.stand_in
def test_completions_have_the_older_shape(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="rill", prompt="Count, please.", max_tokens=8, temperature=0, logprobs=2)
    [choice] = answer.choices
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    assert told.token_logprobs == pytest.approx([LIKELIEST] * 8, rel=1e-5)
    assert told.top_logprobs is not None
    for token, offset, top in zip(told.tokens, told.text_offset, told.top_logprobs, strict=True):
        assert choice.text[offset:].startswith(token)
        assert len(top) == 2
        assert top[token] == pytest.approx(LIKELIEST, rel=1e-5)


def test_echo_puts_the_prompt_first(live: LiveServer) -> None:
    ids = live.run(live.model.prepare(TEXT["prompt"]))
    body = TEXT | {"max_tokens": 3, "echo": True}
    choice = live.post(TEXT_PATH, body | {"logprobs": 1}).json()["choices"][0]
    assert choice["text"] == TEXT["prompt"] + live.echo(ids, 3)
    assert live.post(TEXT_PATH, body).json()["choices"][0]["text"] == choice["text"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert all(value is not None for value in told["token_logprobs"][1:])
    assert "prompt_logprobs" not in choice


def test_prompt_logprobs_have_vllm_s_shape(live: LiveServer) -> None:
    ids = live.run(live.model.prepare(TEXT["prompt"]))
    choice = live.post(TEXT_PATH, TEXT | {"prompt_logprobs": 1, "max_tokens": 1}).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for token_id, told in zip(ids[1:], others, strict=True):
        assert told[str(token_id)]["decoded_token"] == live.model.tokenizer.token_texts[token_id].text
        assert {entry["rank"] for entry in told.values()} == {None, 1}
    assert choice["logprobs"] is None


def test_a_banned_token_s_log_probability_is_the_model_s_own(live: LiveServer) -> None:
    """Log probabilities ignore the bias: a forbidden token may still be the likeliest."""
    ids = live.run(live.model.prepare("x"))
    body = TEXT | {"prompt": "x", "max_tokens": 1, "logprobs": 1}
    plain = live.post(TEXT_PATH, body).json()["choices"][0]
    [token] = live.run(live.model.prepare(live.echo(ids, 1)))
    biased = live.post(TEXT_PATH, body | {"logit_bias": {str(token): -100}}).json()["choices"][0]
    assert biased["text"] != plain["text"]
    assert biased["logprobs"]["top_logprobs"][0][plain["text"]] == pytest.approx(LIKELIEST, rel=1e-5)


def spelled_by(label: str) -> bytes:
    """Return the bytes of a completion's token, which is text or OpenAI's form for a part of a character."""
    if not label.startswith("bytes:"):
        return label.encode()
    return bytes.fromhex(label.removeprefix("bytes:").replace("\\x", ""))


def test_tokens_that_are_no_whole_characters_keep_their_places(live: LiveServer) -> None:
    prompt = "a😀漢é"
    body = TEXT | {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 20}
    told = live.post(TEXT_PATH, body).json()["choices"][0]["logprobs"]
    assert b"".join(map(spelled_by, told["tokens"][:-1])).decode() == prompt
    assert any(token.startswith("bytes:") for token in told["tokens"])
    for token, top in zip(told["tokens"][1:], told["top_logprobs"][1:], strict=True):
        assert token in top and len(top) in (20, 21)


def test_chat_spells_parts_of_characters_in_bytes(live: LiveServer) -> None:
    table = live.model.tokenizer.token_texts
    [part_id, *_] = live.run(live.model.prepare("😀"))
    bias = {str(part_id): 100}
    body = CHAT | {"logprobs": True, "top_logprobs": 20, "max_tokens": 3, "logit_bias": bias}
    entries = live.post(CHAT_PATH, body).json()["choices"][0]["logprobs"]["content"]
    for entry in entries:
        assert (
            entry["token"] == "\ufffd"
            and bytes(entry["bytes"]) == table[part_id].spelled == "😀".encode()[: len(entry["bytes"])]
        )
        spelled = [bytes(each["bytes"]) for each in entry["top_logprobs"]]
        assert len(set(spelled)) == len(spelled) == 20


def test_tokens_of_one_text_have_an_entry_each() -> None:
    same = [TokenText(5, "A", b"A"), TokenText(65, "A", b"A"), TokenText(66, "A", b"A")]
    part = [
        TokenText(200, "\ufffd", b"\xe2"),
        TokenText(201, "\ufffd", b"\xe3"),
        TokenText(9, "\ufffd", b"\xef\xbf\xbd"),
    ]
    top = tuple((token, -1.0 - place) for place, token in enumerate((*same, *part)))
    told = completion_logprobs([TextLogprob(same[1], -2.0, 0, top), TextLogprob(part[1], -9.0, 1, top[:2])], 6)
    assert told["tokens"] == ["A", "bytes:\\xe3"]
    assert told["top_logprobs"] == [
        {"token_id:5": -1.0, "A": -2.0, "token_id:66": -3.0, "bytes:\\xe2": -4.0, "bytes:\\xe3": -5.0, "\ufffd": -6.0},
        {"A": -1.0, "token_id:65": -2.0, "bytes:\\xe3": -9.0},
    ]
