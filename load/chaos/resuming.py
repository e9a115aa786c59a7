"""A client that loses its connection again and again, and comes back for the rest of its stream at either gateway."""

import asyncio
import json
import random
import time
from contextlib import AbstractAsyncContextManager
from uuid import UUID

import httpx

from sluice.load.apis import make_api
from sluice.load.chaos.answers import text_of
from sluice.load.chaos.fleet import Fleet, Gateway
from sluice.load.chaos.outcomes import Outcome, OutcomeVerdict
from sluice.load.chaos.questions import Question, QuestionKind
from sluice.load.config import ApiKind
from sluice.load.stream import DONE

RESUMED = QuestionKind(ApiKind.CHAT, note="resumed")
TIMEOUT_S = 90.0
_PAUSE_S = 0.3
_MOST_EVENTS = 30
_NO_CONTENT, _OK = 204, 200
_ID, _DATA = b"id: ", b"data: "


class _EndedError(Exception):
    """The stream has ended, as `verdict` says."""

    def __init__(self, verdict: OutcomeVerdict) -> None:
        super().__init__(verdict.detail)
        self.verdict = verdict


class Resumption:
    """Reads a stream over as many connections as it takes."""

    def __init__(self, fleet: Fleet, question: Question, rng: random.Random) -> None:
        self._fleet = fleet
        self._question = question
        self._rng = rng
        self._key = str(UUID(int=rng.getrandbits(128)))
        self._stream = ""
        self._last = 0
        self._last_id = ""
        """The id of the last event, as it came."""
        self._texts: list[str] = []
        self._said = "no connection"
        """The last attempt's answer in place of events."""
        self.owner: Gateway = rng.choice(fleet.gateways)
        """The gateway that was asked first."""

    async def read(self, expected: str | None) -> OutcomeVerdict:
        """Read to the end, and return how it ended. One that cannot be read to its end in time is lost."""
        begun_at = time.time()
        while time.time() - begun_at < TIMEOUT_S:
            try:
                await self._connect()
            except httpx.HTTPError as error:
                self._said = repr(error)
            except _EndedError as ended:
                if ended.verdict.outcome is not Outcome.COMPLETED or "".join(self._texts) == expected:
                    return ended.verdict
                return OutcomeVerdict(Outcome.WRONG, "text", f"{''.join(self._texts)!r} in place of {expected!r}")
            await asyncio.sleep(_PAUSE_S)
        return OutcomeVerdict(
            self._lost_outcome(begun_at), "stream", f"{self._stream} after event {self._last}: {self._said}"
        )

    def _lost_outcome(self, begun_at: float) -> Outcome:
        """A stream is lost with its gateway where Redis could not keep it for the other."""
        now = time.time()
        is_without_redis = self._fleet.redis is None or any(
            each.touches(begun_at, now) for each in self._fleet.redis_outages
        )
        is_cut = self.owner.may_have_lost(begun_at, now)
        return Outcome.CUT if is_cut and is_without_redis else Outcome.LOST

    async def _connect(self) -> None:
        """Read some events over one connection. Raises _EndedError at the end of the stream, HTTPError."""
        async with self._send() as answer:
            if answer.status_code == _OK:
                self._stream = answer.headers.get("x-sluice-stream", self._stream)
                await self._read_events(answer)
                return
            self._said = f"{answer.status_code} {(await answer.aread())[:300].decode(errors='replace')}"
            if not self._stream and answer.status_code not in (_OK, _NO_CONTENT):
                raise _EndedError(_judge_refusal(answer.status_code, self._said))

    def _send(self) -> AbstractAsyncContextManager[httpx.Response]:
        client, question = self._fleet.client, self._question
        if self._stream:
            url = f"{self._rng.choice(self._fleet.gateways).url}/v1/streams/{self._stream}"
            return client.stream("GET", url, headers={"last-event-id": self._last_id or f"{self._stream}:0"})
        api = make_api(ApiKind.CHAT)
        body = api.body(question.kind.model, question.prompt, question.max_tokens, question.kind.workload())
        headers = {"x-sluice-resume": "true", "idempotency-key": self._key, "content-type": "application/json"}
        return client.stream("POST", self.owner.url + api.path(""), content=body, headers=headers)

    async def _read_events(self, answer: httpx.Response) -> None:
        """Read until the end, or as many events as this connection lasts."""
        num_left, pending = self._rng.randint(1, _MOST_EVENTS), b""
        async for piece in answer.aiter_bytes():
            *events, pending = (pending + piece).split(b"\n\n")
            for event in events:
                self._take(event)
                num_left -= 1
            if num_left <= 0:
                return

    def _take(self, event: bytes) -> None:
        """Take a complete event. Raises _EndedError for the last one, and for one that should not be there."""
        lines = event.split(b"\n")
        data = next((line.removeprefix(_DATA) for line in lines if line.startswith(_DATA)), None)
        id_ = next((line.removeprefix(_ID) for line in lines if line.startswith(_ID)), None)
        number = None if id_ is None else int(id_.rpartition(b":")[2])
        if data is None:  # a comment that keeps the connection
            return
        if b'"error"' in data and number is None:
            raise _EndedError(OutcomeVerdict(Outcome.ERROR, "error_event", data.decode(errors="replace")))
        if number != self._last + 1:
            raise _EndedError(
                OutcomeVerdict(Outcome.WRONG, "number", f"event {number} after event {self._last}: {data!r}")
            )
        self._last, self._last_id = number, (id_ or b"").decode()
        if data == DONE:
            raise _EndedError(OutcomeVerdict(Outcome.COMPLETED))
        if "error" in json.loads(data):
            raise _EndedError(OutcomeVerdict(Outcome.ERROR, "error_event", data.decode(errors="replace")))
        self._texts.append(text_of(data))


def _judge_refusal(status: int, said: str) -> OutcomeVerdict:
    is_expected = status in (429, 503, 504)
    return OutcomeVerdict(Outcome.ERROR if is_expected else Outcome.WRONG, f"http_{status}", said)
