"""Decisions by the probabilities of the next token: scores of items, and questions with options."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from fastapi import Request

from sluice.engine.config import EngineConfig
from sluice.engine.types import FinishReason
from sluice.gateway.api.openai.decisions import ScoringRequest, ScoringTranslator
from sluice.pipelines.text.types import TextDetail, TextEvent
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.front.http.live import LiveServer, live_server
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.waiting import turns_of

SCORING, DECISIONS = "/generative_scoring", "/v1/systemone"
QUERY = [*range(100, 180)]
LABELS = [7, 3000, 42]
QUESTIONS: dict[str, Any] = {
    "room": {"type": "choice", "instructions": "Which room?", "criteria": {"hall": "the first", "loft": None}},
    "light": {"type": "noul", "criteria": {"true": "it is on"}},
    "level": {"type": "score", "criteria": ["none", "some", "all"]},
}


def ok(live: LiveServer, path: str, body: Any) -> Any:
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_scores_are_the_models_probabilities(live: LiveServer) -> None:
    items = [[200], [300, 301], "Hello"]
    sent = {"query": QUERY, "items": items, "label_token_ids": LABELS, "request_id": "mine"}
    found = ok(live, SCORING, sent)
    assert (found["id"], found["object"], found["model"]) == ("generative-scoring-mine", "list", "rill")
    assert [(each["index"], each["object"]) for each in found["data"]] == [(i, "score") for i in range(3)]
    for each in found["data"]:
        assert each["score"] == each["probabilities"][0]
        assert math.isclose(sum(each["probabilities"]), 1)
    assert found["usage"]["prompt_tokens"] == 3 * 80 + 1 + 2 + len(
        live.model.tokenizer.encode("Hello", "", add_special_tokens=False)
    )
    assert found["usage"]["completion_tokens"] == 3


async def test_the_probabilities_of_each_item_are_written_in_a_turn_of_their_own(live: LiveServer) -> None:
    num_items = 9
    fields = ScoringRequest.model_validate({"query": "", "items": [[1]] * num_items, "label_token_ids": [0, 1]})
    scope = {"type": "http", "headers": [], "state": {"request_id": "mine", "began_at": 0.0}}
    translator = ScoringTranslator(fields.model_copy(update={"model": "rill"}), Request(scope), live.server.plane)
    translator._labels = [[0, 1]] * num_items
    reply = translator.reply(live.model, ())
    for index in range(num_items):
        logits = np.array([index, 1, 2], np.float32).tobytes()
        reply.collector(index)(TextEvent("", 0, 1, 1, detail=TextDetail(logits=logits)))
        reply.collector(index)(TextEvent("", 0, 1, 1, finish_reason=FinishReason.LENGTH))
    answer, num_turns = await turns_of(reply.whole())
    assert len(orjson.loads(answer)["data"]) == num_items <= num_turns


@pytest.mark.parametrize("item_first", [False, True])
def test_without_softmax_they_are_those_among_all_tokens(live: LiveServer, item_first: bool) -> None:
    prompt = [200, *QUERY] if item_first else [*QUERY, 200]
    body = {
        "prompt": prompt,
        "model": "rill",
        "max_tokens": 1,
        "logprobs": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    [choice] = ok(live, "/v1/completions", body | {"return_tokens_as_token_ids": True})["choices"]
    expected = {int(name.split(":")[1]): value for name, value in choice["logprobs"]["top_logprobs"][0].items()}
    sent = {"query": QUERY, "items": [[200]], "label_token_ids": [*expected], "item_first": item_first}
    raw = ok(live, SCORING, sent | {"apply_softmax": False})["data"][0]["probabilities"]
    assert raw == pytest.approx([math.exp(value) for value in expected.values()], rel=1e-5)
    among = ok(live, SCORING, sent)["data"][0]["probabilities"]
    assert among == pytest.approx([each / sum(raw) for each in raw], rel=1e-9)


def test_the_items_share_the_prefix_of_their_query(live: LiveServer) -> None:
    query = [*range(1000, 1320)]
    sent = {"query": query, "items": [[number] for number in range(40, 52)], "label_token_ids": LABELS}
    usage = ok(live, SCORING, sent)["usage"]
    assert usage["prompt_tokens"] == 12 * 321
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 11 * 320


@pytest.mark.parametrize("say", ["B", "yes", "2"])
def test_questions_are_answered_by_the_likeliest_label(chat_live: LiveServer, random_answers: None, say: str) -> None:
    chat_live.say(say)
    found = ok(chat_live, DECISIONS, {"state": {"door": "open"}, "questions": QUESTIONS, "instructions": "Be brief."})
    answers, told = found["answers"], found["diagnostics"]
    assert found["object"] == "structured_decision" and list(answers) == list(QUESTIONS)
    assert answers["level"]["legend"] == {"0": "none", "1": "some", "2": "all"}
    for name, each in answers.items():
        assert math.isclose(sum(each["probabilities"].values()), 1)
        assert told[name]["argmax_is_label"] == (name == {"B": "room", "yes": "light", "2": "level"}[say])
        assert each["confidence"] <= told[name]["label_mass"] + 1e-9
    expected = {"B": ("room", "choice", "loft"), "yes": ("light", "noul", 1.0), "2": ("level", "score", 2.0)}
    name, field, value = expected[say]
    assert answers[name][field] == (value if isinstance(value, str) else pytest.approx(value))
    assert answers[name]["confidence"] == pytest.approx(1)


REFERENCE = {
    (200,): [7.311660778233027e-05, 0.00012055982501158195, 9.218534720428335e-05],
    (300, 301): [9.330627498626174e-05, 4.092042642403281e-05, 6.0395573778407186e-05],
}
"""The softmax of the logits of transformers 5.19, in float32, at the labels after the query and each item."""


def test_a_real_model_has_the_probabilities_of_transformers(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "1")
    config = EngineConfig(model_path=str(checkpoint), dtype="f32", num_blocks=64, max_model_len=256, num_threads=1)
    sent = {"query": QUERY, "items": [[*item] for item in REFERENCE], "label_token_ids": LABELS}
    with live_server(given_engine=lambda: InProcessEngineClient(config), checkpoint=checkpoint) as live:
        for fields, scale in (({"apply_softmax": False}, lambda row: 1), ({}, sum)):
            data = ok(live, SCORING, sent | fields)["data"]
            for each, row in zip(data, REFERENCE.values(), strict=True):
                assert each["probabilities"] == pytest.approx([value / scale(row) for value in row], rel=1e-5)


SCORED: dict[str, Any] = {"query": [5], "items": [[6]], "label_token_ids": [7]}
ASKED: dict[str, Any] = {"state": "x", "questions": {"a": {"type": "noul"}}}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (SCORING, SCORED | {"label_token_ids": []}, "label_token_ids", "must not be empty"),
        (SCORING, SCORED | {"label_token_ids": [5, 10**6]}, "label_token_ids[1]", "must be a token id from 0"),
        (SCORING, SCORED | {"items": []}, "items", "must not be empty"),
        (SCORING, SCORED | {"items": [[10**6]]}, "items[1]", "must be a token id"),
        (SCORING, SCORED | {"query": 5}, "query", "a string or an array of token ids, got 5"),
        (SCORING, SCORED | {"query": [5] * 2000}, "items", "context"),
        (SCORING, SCORED | {"model": "no"}, "model", "not found"),
        (DECISIONS, ASKED | {"questions": {}}, "questions", "must not be empty"),
        (DECISIONS, ASKED | {"questions": {"a": {"type": "x"}}}, "questions.a.type", "'choice', 'noul' or 'score'"),
        (DECISIONS, ASKED | {"questions": {"a": {"type": "choice"}}}, "questions.a.criteria", "1 to 26 options"),
        (
            DECISIONS,
            ASKED | {"questions": {"a": {"type": "score", "criteria": ["x"]}}},
            "questions.a.criteria",
            "an array of 2 to 10 levels, the lowest first, got an array of 1",
        ),
        (DECISIONS, ASKED | {"images": ["data:"]}, "images", "images is not supported"),
        (
            DECISIONS,
            ASKED | {"chat_template_kwargs": {"enable_thinking": None, "opens": True}},
            "model",
            "begin with reasoning",
        ),
    ],
)
def test_what_nobody_can_decide_is_said(
    chat_live: LiveServer, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = chat_live.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and words in error["message"], answer.text
    assert error["param"] == param
