"""The client that comes back: what it takes for whole, for wrong and for lost."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from sluice.load.chaos import resuming
from sluice.load.chaos.fleet import FaultSpan, Fleet, Gateway
from sluice.load.chaos.outcomes import Outcome, OutcomeVerdict
from sluice.load.chaos.processes import Program
from sluice.load.chaos.questions import Question, QuestionKind
from sluice.load.chaos.resuming import Resumption
from sluice.load.config import ApiKind

QUESTION = Question(QuestionKind(ApiKind.CHAT), 0, "Hi", 4)
TEXTS = [f"{number} " for number in range(200)]
Handler = Callable[[httpx.Request], httpx.Response]


def event(number: int) -> bytes:
    data = "[DONE]" if number > len(TEXTS) else json.dumps({"choices": [{"delta": {"content": TEXTS[number - 1]}}]})
    return f"id: s:{number}\ndata: {data}\n\n".encode()


def keep_stream(request: httpx.Request) -> httpx.Response:
    """Answer as a gateway does that has the whole stream."""
    last = int(request.headers.get("last-event-id", ":0").rpartition(":")[2])
    body = b": comment\n\n" + b"".join(event(number) for number in range(last + 1, len(TEXTS) + 2))
    return httpx.Response(200, headers={"x-sluice-stream": "s"}, content=body)


async def read(handler: Handler, expected: str = "".join(TEXTS), *, is_cut: bool = False) -> OutcomeVerdict:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        gateways = [Gateway(Program(name, (), Path("log")), 1, 2, 3) for name in ("near", "far")]
        fleet = Fleet(Path(), gateways, [], None, None, {}, client)
        if is_cut:
            for each in gateways:
                each.cuts.append(FaultSpan(time.time()))
        return await Resumption(fleet, QUESTION, random.Random(3)).read(expected)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "_PAUSE_S", 0.001)


async def test_a_stream_over_many_connections_is_whole() -> None:
    asked: list[str] = []

    def cut_after_three(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        answer = keep_stream(request)
        return httpx.Response(200, headers=answer.headers, content=answer.content[:130])

    assert await read(cut_after_three) == OutcomeVerdict(Outcome.COMPLETED)
    assert asked[0] == "POST"
    assert set(asked[1:]) == {"GET"}


def answering(status: int, content: bytes) -> Handler:
    return lambda _: httpx.Response(status, headers={"x-sluice-stream": "s"}, content=content)


@pytest.mark.parametrize(
    ("handler", "expected", "outcome"),
    [
        pytest.param(keep_stream, "other", Outcome.WRONG, id="another text"),
        pytest.param(answering(200, event(1) + event(3)), "", Outcome.WRONG, id="a missing event"),
        pytest.param(
            answering(200, event(1) + b'id: s:2\ndata: {"error": {"message": "unavailable"}}\n\n'),
            "",
            Outcome.ERROR,
            id="an error event",
        ),
        pytest.param(answering(503, b"{}"), "", Outcome.ERROR, id="a refusal"),
        pytest.param(answering(400, b"{}"), "", Outcome.WRONG, id="a refusal as of a bad request"),
    ],
)
async def test_how_a_stream_ends(handler: Handler, expected: str, outcome: Outcome) -> None:
    assert (await read(handler, expected)).outcome is outcome


@pytest.mark.parametrize(("is_cut", "expected"), [(False, Outcome.LOST), (True, Outcome.CUT)])
async def test_one_that_nobody_has_is_lost_unless_its_gateway_was_killed(
    monkeypatch: pytest.MonkeyPatch, is_cut: bool, expected: Outcome
) -> None:
    monkeypatch.setattr(resuming, "TIMEOUT_S", 0.05)

    def forget(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(404, content=b'{"error": {"message": "no stream"}}')
        return httpx.Response(200, headers={"x-sluice-stream": "s"}, content=event(1))

    verdict = await read(forget, is_cut=is_cut)
    assert (verdict.outcome, "404" in verdict.detail) == (expected, True)
