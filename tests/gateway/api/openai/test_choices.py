"""Several answers to one prompt."""

from typing import Any

import openai
import pytest

from tests.gateway.front.http.live import LiveServer
from tests.gateway.front.http.sse import events_of

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
CHAT: dict[str, Any] = {"model": "rill", "messages": MESSAGES, "max_tokens": 6, "temperature": 1.0, "seed": 11}
TEXT: dict[str, Any] = {"model": "rill", "prompt": "Say something.", "max_tokens": 6, "temperature": 1.0, "seed": 11}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


def test_the_prompt_counts_once(live: LiveServer) -> None:
    one, four = (live.post(CHAT_PATH, CHAT | {"n": n}).json()["usage"] for n in (1, 4))
    assert four["prompt_tokens"] == one["prompt_tokens"]
    assert four["completion_tokens"] == 24


def test_a_stream_opens_every_choice_with_its_role(live: LiveServer) -> None:
    whole = live.post(CHAT_PATH, CHAT | {"n": 3}).json()["choices"]
    body = CHAT | {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    *events, usage, _ = events_of(live.post(CHAT_PATH, body).content)
    choices = [event["choices"][0] for event in events]
    assert [choice["index"] for choice in choices if choice["delta"].get("role")] == [0, 1, 2]
    for index in range(3):
        pieces = [choice["delta"].get("content", "") for choice in choices if choice["index"] == index]
        assert "".join(pieces) == whole[index]["message"]["content"]
    assert usage["usage"]["completion_tokens"] == 18


def test_several_prompts_have_n_choices_each(live: LiveServer) -> None:
    prompts = ["one thing", "another thing"]
    body = TEXT | {"n": 2}
    alone = [live.post(TEXT_PATH, body | {"prompt": prompt}).json()["choices"] for prompt in prompts]
    choices = live.post(TEXT_PATH, body | {"prompt": prompts}).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [choice["text"] for group in alone for choice in group]


def mean_logprob(choice: dict[str, Any]) -> float:
    values = choice["logprobs"]["token_logprobs"]
    return float(sum(values) / len(values))


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}])
def test_best_of_gives_the_likeliest(live: LiveServer, fields: dict[str, Any]) -> None:
    body = TEXT | {"ignore_eos": True, "temperature": 0.5}
    every = live.post(TEXT_PATH, body | {"n": 8, "logprobs": 0}).json()["choices"]
    expected = sorted(every, key=mean_logprob, reverse=True)[:2]
    answer = live.post(TEXT_PATH, body | {"best_of": 8, "n": 2} | fields).json()
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 48
    assert all((choice["logprobs"] is None) == (not fields) for choice in answer["choices"])


def test_best_of_equal_to_n_may_stream(live: LiveServer) -> None:
    *events, _ = events_of(live.post(TEXT_PATH, TEXT | {"n": 2, "best_of": 2, "stream": True}).content)
    assert {event["choices"][0]["index"] for event in events} == {0, 1}


def test_cached_tokens_are_told_where_openai_tells_them(live: LiveServer, client: openai.OpenAI) -> None:
    prompt = [7] * 100
    for expected in (0, 96):
        answer = client.completions.create(model="rill", prompt=prompt, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected
    body = {"model": "rill", "prompt": prompt, "max_tokens": 2, "n": 3}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, usage, _ = events_of(live.post(TEXT_PATH, body | options).content)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 96, "audio_tokens": 0}


def test_a_salt_shares_with_nobody_else(live: LiveServer) -> None:
    body = {"model": "rill", "prompt": [8] * 100, "max_tokens": 1}

    def cached(**fields: str) -> int:
        usage = live.post(TEXT_PATH, body | fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [
        *(0, 96, 0, 0, 96)
    ]


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
def test_a_seed_of_minus_one_is_a_new_one_for_each_choice(live: LiveServer, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answers = [live.post(path, body | {"seed": -1, "n": 3, "max_tokens": 20}) for _ in range(2)]
    choices = [choice for answer in answers for choice in answer.json()["choices"]]
    texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
    assert len(set(texts)) == 6
