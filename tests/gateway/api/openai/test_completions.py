"""Completions: every form of prompt, one choice for each, run at the same time."""

from typing import Any

import pytest

from tests.gateway.front.http.live import LiveServer
from tests.gateway.front.http.sse import events_of

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "rill", "max_tokens": 12, "temperature": 0}


def ids_of(live: LiveServer, text: str) -> list[int]:
    return live.run(live.model.prepare(text))


def streamed_texts(events: list[Any], num_choices: int) -> list[str]:
    texts = [""] * num_choices
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


@pytest.mark.parametrize("form", ["text", "ids"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_several_prompts(live: LiveServer, form: str, stream: bool) -> None:
    texts = [f"prompt number {number}" for number in range(5)]
    all_ids = [ids_of(live, text) for text in texts]
    body = BODY | {"prompt": texts if form == "text" else all_ids}
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done = events_of(live.post(PATH, body | options).content)
        assert done == "[DONE]"
        got, counts = streamed_texts(chunks, 5), usage["usage"]
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order != sorted(order) or not live.is_paced, "the choices did not run at the same time"
        ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
        assert ends == ["length"] * 5
    else:
        answer = live.post(PATH, body).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4]
        got, counts = [choice["text"] for choice in answer["choices"]], answer["usage"]
    assert got == [live.echo(ids, 12) for ids in all_ids]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (sum(map(len, all_ids)), 60)


def test_one_bad_prompt_refuses_them_all_and_leaves_nothing_behind(live: LiveServer) -> None:
    response = live.post(PATH, BODY | {"prompt": [[5, 6], [5] * 2000, [7]]})
    assert response.status_code == 400
    assert "2000 tokens" in response.json()["error"]["message"]
    live.wait_idle()
    assert live.blocks_used_after_step() == 0


def test_the_bytes_of_a_stream(live: LiveServer) -> None:
    ids = ids_of(live, "a")
    body = BODY | {"prompt": "a", "max_tokens": 3, "stream": True}
    *chunks, end, done = events_of(live.post(PATH, body, headers={"x-request-id": "abc"}).content)
    head = {"id": "cmpl-abc", "object": "text_completion", "model": "rill"}
    head |= {name: end[name] for name in ("created", "system_fingerprint")}
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == live.echo(ids, 3)
    for chunk in chunks:
        text = chunk["choices"][0]["text"]
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        assert chunk == head | {"choices": [choice]}
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert end == head | {"choices": [choice]}


def test_max_tokens_may_be_left_out_where_the_context_leaves_fewer_than_16(live: LiveServer) -> None:
    answer = live.post("/v1/completions", {"model": "rill", "prompt": [9] * 1020, "temperature": 0})
    assert answer.json()["usage"]["completion_tokens"] == 4


HARNESS: dict[str, Any] = {"model": "rill", "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
"""The requests of lm-evaluation-harness for log likelihoods, whose releases send max_tokens 0 or 1."""


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_with_max_tokens_0_gives_the_prompt_s_log_probabilities(live: LiveServer, is_streamed: bool) -> None:
    prompts = [live.run(live.model.prepare(text)) for text in ("The sea is wide.", "A b c")]
    body = HARNESS | {"prompt": prompts, "max_tokens": 0, "stream": is_streamed}
    response = live.post("/v1/completions", body)
    if is_streamed:
        *events, _ = events_of(response.content)
        choices = [event["choices"][0] for event in events if event["choices"][0]["logprobs"]]
        choices.sort(key=lambda choice: choice["index"])
    else:
        choices = response.json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
        usage, num_prompt = response.json()["usage"], sum(map(len, prompts))
        counted = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
        assert counted == (num_prompt, 0, num_prompt)
    longer = live.post("/v1/completions", HARNESS | {"prompt": prompts, "max_tokens": 1}).json()["choices"]
    for ids, choice, long in zip(prompts, choices, longer, strict=True):
        told = choice["logprobs"]
        tokens, logprobs, tops = told["tokens"], told["token_logprobs"], told["top_logprobs"]
        assert len(tokens) == len(logprobs) == len(tops) == len(told["text_offset"]) == len(ids)
        assert logprobs[0] is None and None not in logprobs[1:]
        # The prompts may be computed in one step or in two, and torch's products of another number of rows differ in
        # the last bits.
        assert logprobs[1:] == pytest.approx(long["logprobs"]["token_logprobs"][1:-1], rel=1e-6)
        for token, logprob, top in zip(tokens[1:], logprobs[1:], tops[1:], strict=True):
            assert top[token] == logprob  # the harness asks whether the likeliest was chosen


def test_echo_with_max_tokens_0_may_do_without_log_probabilities(live: LiveServer) -> None:
    body = {"model": "rill", "prompt": "The sea", "echo": True, "max_tokens": 0, "best_of": 2, "n": 1}
    [choice] = live.post("/v1/completions", body).json()["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("The sea", None, "length")


def test_max_tokens_0_needs_echo(live: LiveServer) -> None:
    refused = live.post("/v1/completions", BODY | {"prompt": "a", "max_tokens": 0})
    assert refused.status_code == 400
    assert "without echo, got 0" in refused.json()["error"]["message"]


def test_max_tokens_is_16_where_it_is_not_given(live: LiveServer) -> None:
    answer = live.post(PATH, {"model": "rill", "prompt": "a", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
