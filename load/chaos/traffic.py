"""The clients of the fleet: they ask questions of all kinds, and find out how each request ended."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from sluice.load.callers import Caller, Clock, HttpCaller
from sluice.load.chaos.answers import TextReader
from sluice.load.chaos.fleet import Fleet, Gateway
from sluice.load.chaos.outcomes import STILL_READING, Outcome, OutcomeVerdict, Tally, judge
from sluice.load.chaos.questions import Question, QuestionKind, light_questions, make_questions
from sluice.load.chaos.resuming import RESUMED, Resumption
from sluice.load.config import ApiKind, LoadConfig, LoadTarget, RequestPace
from sluice.load.single_run import open_caller
from sluice.load.stream import Failure, LiveCounts, PlannedRequest

TIMEOUT_S = 120.0
"""A request that has no end by then hangs: no fault lasts half as long."""
LEAVING_SHARE = 0.12
_LONGEST_STAY_S = 0.5
_RECONNECT_PAUSE_S = 0.3
_LIGHT_PAUSE_S = 0.02
_NOTICED_S = 1.0
"""A standstill of the machine is noticed within this time."""
_NUM_LEARNING = 8
_ONE_RESUMES_OF = 6
_NO_PACE = RequestPace(concurrency=1, num_requests=1)


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that was answered whole: the ledger of its gateway must have a row for it."""

    gateway: str
    ended_at: float
    output_tokens: int | None
    """None where its protocol does not tell."""


@dataclass(slots=True)
class Traffic:
    """Sends questions to the gateways of a fleet. Use as an async context manager, once the fleet serves."""

    fleet: Fleet
    seed: int
    tally: Tally = field(default_factory=Tally)
    completions: dict[str, Completion] = field(default_factory=dict)
    """Requests that ended well over HTTP, by request id."""
    texts: dict[tuple[object, ...], str] = field(default_factory=dict)
    """The text of each answer, learned before the first fault."""
    questions: list[Question] = field(default_factory=make_questions)
    is_stopping: bool = False
    _callers: dict[tuple[str, QuestionKind], Caller] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> "Traffic":
        for gateway in self.fleet.gateways:
            for kind in {each.kind for each in self.questions}:
                caller = open_caller(_config(gateway, kind), Clock(), kind.make_api())
                self._callers[gateway.name, kind] = await self._stack.enter_async_context(caller)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def learn(self) -> None:
        """Ask each question of each gateway, a few at a time, and remember the texts.

        A gateway that answers otherwise than another, or streamed otherwise than whole, is counted as wrong.
        """
        slots = asyncio.Semaphore(_NUM_LEARNING)

        async def ask(gateway: Gateway, question: Question) -> None:
            async with slots:
                await self._ask(gateway, question, None)

        await asyncio.gather(*(ask(gateway, each) for each in self.questions for gateway in self.fleet.gateways))

    async def ask_each_kind(self) -> None:
        """Ask both gateways a question of every kind, all at once; some of the clients leave."""
        rng = random.Random(self.seed)
        chosen = {each.kind: each for each in rng.sample(self.questions, len(self.questions))}
        asking = [self._ask(gateway, each, rng) for gateway in self.fleet.gateways for each in chosen.values()]
        await asyncio.gather(*asking)

    async def run(self, num_clients: int, num_light: int = 0) -> None:
        """Run clients until `is_stopping`: `num_clients` everything, some of whom come back to streams that they
        have lost, and `num_light` what costs little, so that there are many requests."""
        num_resuming = -(-num_clients // _ONE_RESUMES_OF)
        resuming = (self._run_resuming(number) for number in range(num_resuming))
        asking = (self._run_client(f"{number}", self.questions) for number in range(num_clients - num_resuming))
        light = light_questions(self.questions)
        quick = (self._run_client(f"light {number}", light, _LIGHT_PAUSE_S) for number in range(num_light))
        await asyncio.gather(*resuming, *asking, *quick)

    async def _run_resuming(self, number: int) -> None:
        rng = random.Random(f"{self.seed} resuming {number}")
        chats = [each for each in self.questions if each.kind == QuestionKind(ApiKind.CHAT, weight=each.kind.weight)]
        while not self.is_stopping:
            self.tally.num_sent += 1
            question, begun_at = rng.choice(chats), time.time()
            resumption = Resumption(self.fleet, question, rng)
            verdict = await resumption.read(self.texts.get(question.answer_key))
            verdict = await self._excuse(verdict, resumption.owner, begun_at)
            self.tally.add(RESUMED.name, verdict, _about(f"of client {number}", RESUMED, resumption.owner, begun_at))

    async def _run_client(self, name: str, questions: Sequence[Question], pause_s: float = 0.0) -> None:
        rng = random.Random(f"{self.seed} {name}")
        weights = [each.kind.weight for each in questions]
        while not self.is_stopping:
            [question] = rng.choices(questions, weights)
            verdict = await self._ask(rng.choice(self.fleet.gateways), question, rng)
            is_refused = verdict.outcome in (Outcome.CUT, Outcome.LOST, Outcome.ERROR)
            await asyncio.sleep(_RECONNECT_PAUSE_S if is_refused else pause_s)

    async def _ask(self, gateway: Gateway, question: Question, leaving: random.Random | None) -> OutcomeVerdict:
        """Send one request and count how it ends. With `leaving`, some clients leave at a random moment."""
        self.tally.num_sent += 1
        request_id = f"chaos-{self.seed}-{self.tally.num_sent}"
        caller = self._callers[gateway.name, question.kind]
        if isinstance(caller, HttpCaller):
            headers = (("x-request-id", request_id),)
            caller = replace(caller, target=replace(caller.target, headers=headers))
        begun_at = time.time()
        exchange = _Exchange(caller, question)
        await exchange.run(leaving)
        verdict = exchange.judge(self.texts.get(question.answer_key))
        verdict = await self._excuse(verdict, gateway, begun_at)
        if verdict.outcome is Outcome.COMPLETED:
            self._note_completion(gateway, question, request_id, exchange.reader)
        self.tally.add(question.kind.name, verdict, _about(request_id, question.kind, gateway, begun_at))
        return verdict

    async def _excuse(self, verdict: OutcomeVerdict, gateway: Gateway, begun_at: float) -> OutcomeVerdict:
        """Return the verdict, or that the request was cut where its connection broke for a kill or a standstill."""
        if verdict.outcome not in (Outcome.LOST, Outcome.HUNG):
            return verdict
        await asyncio.sleep(_NOTICED_S)
        is_cut = verdict.outcome is Outcome.LOST and gateway.may_have_lost(begun_at, time.time() - _NOTICED_S)
        is_excused = is_cut or self.fleet.stood_still(begun_at, time.time())
        return replace(verdict, outcome=Outcome.CUT) if is_excused else verdict

    def _note_completion(self, gateway: Gateway, question: Question, request_id: str, reader: TextReader) -> None:
        if STILL_READING not in reader.text:
            self.texts.setdefault(question.answer_key, reader.text)
        counted = reader.output_tokens if reader.counted_by == "usage" else None
        self.tally.num_output_tokens += counted or 0
        if not question.kind.is_grpc:
            self.completions[request_id] = Completion(gateway.name, time.time(), counted)


class _Exchange:
    """A request and its answer."""

    def __init__(self, caller: Caller, question: Question) -> None:
        self._caller = caller
        self._question = question
        self._left = asyncio.Event()
        self._broken: Failure | None = None
        must_be_complete = not question.kind.ends_by_itself
        self.reader = TextReader(caller.api, LiveCounts(), must_be_complete, on_leaving=self._left.set)

    async def run(self, leaving: random.Random | None) -> None:
        """Send the request, and read its answer to the end, or until this client leaves."""
        self.reader.leaves_after = leaves_after = self._choose_leaving(leaving)
        planned = PlannedRequest(0, self._question.prompt, 0, self._question.max_tokens, leaves_after)
        self._broken = await self._caller.call(planned, self.reader, self._left)

    def judge(self, expected: str | None) -> OutcomeVerdict:
        """Return how it ended; one whose connection broke is lost. `expected` is its text, where that is known."""
        if self._left.is_set():
            return OutcomeVerdict(Outcome.LEFT)
        failure = self.reader.find_failure(self._question.max_tokens, self._broken)
        return judge(self._question, self.reader.text, failure, expected)

    def _choose_leaving(self, leaving: random.Random | None) -> int | None:
        """Return the token event at which this client leaves, if it does; of a whole answer it leaves after a time."""
        if leaving is None or leaving.random() >= LEAVING_SHARE:
            return None
        if not self._question.kind.is_streamed:
            asyncio.get_running_loop().call_later(leaving.uniform(0, _LONGEST_STAY_S), self._left.set)
        return leaving.randint(1, self._question.max_tokens)


def _about(which: str, kind: QuestionKind, gateway: Gateway, begun_at: float) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(begun_at))
    return f"{which} at {moment} for {time.time() - begun_at:.1f} s, {kind.name} of {gateway.name}"


def _config(gateway: Gateway, kind: QuestionKind) -> LoadConfig:
    url = f"http://127.0.0.1:{gateway.grpc_port}" if kind.is_grpc else gateway.url
    return LoadConfig(LoadTarget(url, kind.api, kind.model, timeout_s=TIMEOUT_S), _NO_PACE, kind.workload())
