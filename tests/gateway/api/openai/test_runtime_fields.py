"""Beam search and the other sampling fields that only some runtimes have."""

from collections.abc import Iterator
from typing import Any

import pytest

from sluice.engine.types import SamplingParams
from tests.engine.capable import CapableEngine
from tests.gateway.front.http.live import LiveServer, live_server

ROUTES = ["/v1/completions", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def capable() -> Iterator[LiveServer]:
    with live_server(engine_class=CapableEngine) as running:
        yield running


def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    prompt: dict[str, Any] = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": messages}
    return {"model": "rill", "max_tokens": 2, **prompt, **fields}


def sampling_of(live: LiveServer) -> SamplingParams:
    assert isinstance(live.engine, CapableEngine)
    return live.engine.asked.sampling


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [{"use_beam_search": True, "best_of": 3}, {"use_beam_search": True, "beam_width": 3}, {"beam_width": 3}],
)
def test_a_beam_search_is_one_sequence(capable: LiveServer, path: str, fields: dict[str, Any]) -> None:
    assert isinstance(capable.engine, CapableEngine)
    before = len(capable.engine.requests)
    answer = capable.post(path, body(path, fields))
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 1
    assert len(capable.engine.requests) == before + 1
    assert sampling_of(capable).beam_width == 3


@pytest.mark.parametrize("path", ROUTES)
def test_fields_reach_the_engine(capable: LiveServer, path: str) -> None:
    fields = {
        "length_penalty": 1.0,
        "beam_search_diversity_rate": 0.5,
        "no_repeat_ngram_size": 3,
        "top_p_min": 0.1,
        "top_p_decay": 0.9,
        "top_p_reset_ids": 4,
    }
    assert capable.post(path, body(path, {**fields, "early_stopping": True})).status_code == 200
    sampling = sampling_of(capable)
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.early_stopping == 1
    assert type(sampling.early_stopping) is int


REFUSED = [
    ({"use_beam_search": True}, "use_beam_search", "use_beam_search needs best_of or beam_width, of at least 2"),
    ({"use_beam_search": True, "best_of": 5}, "best_of", "best_of must be at most 4, the beams of this model, got 5"),
    ({"beam_width": 5}, "beam_width", "beam_width must be at most 4, the beams of this model, got 5"),
    ({"use_beam_search": True, "n": 2}, "n", "n must be 1 with a beam search, got 2: the best beam is the answer"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_refuses(capable: LiveServer, fields: dict[str, Any], param: str, words: str) -> None:
    answer = capable.post(ROUTES[0], body(ROUTES[0], fields))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


NEUTRAL = {"use_beam_search": False, "beam_width": 1, "length_penalty": 0.0, "early_stopping": True, "top_p_decay": 1.0}
NEUTRAL |= {"beam_search_diversity_rate": 0.0, "no_repeat_ngram_size": 0, "top_p_min": 0.0, "top_p_reset_ids": 5}


@pytest.mark.parametrize("path", ROUTES)
def test_values_that_ask_for_nothing_are_taken_everywhere(live: LiveServer, path: str) -> None:
    answer = live.post(path, body(path, NEUTRAL | {"lora_request": None}))
    assert answer.status_code == 200, answer.text
    assert "x-sluice-warning" not in answer.headers
