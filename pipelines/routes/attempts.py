"""The attempts of one generation: which target is asked next, until one has begun to answer."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError, too_long
from sluice.pipelines.answers.cache import AnswerSource, Lookup
from sluice.pipelines.llm.text_models import model_and_adapter
from sluice.pipelines.routes.route import Candidate, Route, join_failures
from sluice.pipelines.routes.target import Attempt
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.stream import salted_form, sent_prompt
from sluice.pipelines.text.types import EncodedPrompt, TextEvent, TextRequest

_MAX_PAUSE_S = 1.0
"""Longest pause before a target is asked again: nobody waits for one that wants to be left alone for longer."""
_GOES_ON = CANNOT_SERVE | {ErrorCode.NOT_FOUND}
"""Codes of failures after which another target is asked."""


class ContextGuard:
    """Keeps one request from targets with a context that is too short for it. Counts tokens where a target with a
    larger context, or an unknown one, could take what another cannot."""

    def __init__(self, lengths: list[int | None]) -> None:
        """`lengths` are the contexts of the targets, in tokens; None where one is not known."""
        self._longest = max((each for each in lengths if each is not None), default=0)
        self._has_unknown = None in lengths
        self._too_short = 0
        """The longest context that was too short."""

    def may_take(self, model: TextModel) -> bool:
        """Whether the request may fit into the model's context, as far as others have shown."""
        return model.max_model_len is None or model.max_model_len > self._too_short

    def note(self, model: TextModel, error: SluiceError) -> None:
        """Note that a model refused the request, maybe for its length."""
        if error.exceeds_context and model.max_model_len is not None:
            self._too_short = max(self._too_short, model.max_model_len)

    async def fit(self, model: TextModel, request: TextRequest) -> TextRequest:
        """Return the request with its prompt encoded for the model, where its length matters. Raises INVALID where it
        is too long for the model and may fit another."""
        request = msgspec.structs.replace(request, prompt=sent_prompt(request.prompt))
        length = model.max_model_len
        if length is None or (length >= self._longest and not self._has_unknown):
            return request
        prompt = await model.prepare_shared(request.prompt, salted_form(request))
        if isinstance(prompt, EncodedPrompt):
            num_prompt, max_tokens = len(prompt.token_ids), request.sampling.get("max_tokens") or 1
            if num_prompt + max_tokens > length:
                what = f"the prompt has {num_prompt} tokens and {max_tokens} of output are asked"
                message = f"{what}; the context of model '{model.name}' is {length} tokens"
                raise too_long("prompt", message, (num_prompt, length - max_tokens))
        return msgspec.structs.replace(request, prompt=prompt)


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """An attempt that has begun to answer, None for an answer that a cache had, and the first event."""

    attempt: Attempt | None
    first: TextEvent
    lookup: Lookup
    candidate: Candidate
    num_attempts: int


class Attempts:
    """Asks the candidates of a route for one answer. Used once, by one task.

    Each round goes through the candidates in their order, past those whose breaker is open. Where all are, the one that
    closes next is asked all the same: without it the route would refuse for sure, and one request more costs a target
    little.
    """

    def __init__(
        self, route: Route, candidates: Sequence[Candidate], request: TextRequest, source: AnswerSource
    ) -> None:
        """`source` is where the answers of the candidates come from."""
        self._route = route
        self._source = source
        self._candidates = candidates
        self._request = request
        self._guard = ContextGuard([each.model.max_model_len for each in candidates])
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()
        self._num_attempts = 0
        self._round: list[Candidate] = list(candidates)
        """The candidates that this round has not come to yet."""
        self._num_rounds = 0
        self._failures: list[tuple[str, SluiceError]] = []
        self._left_alone: dict[str, float] = {}
        """Until when targets have asked to be left alone, as times of the event loop."""

    async def begin(self) -> BegunAnswer:
        """Return the first answer to begin. Raises the last target's error, which says what the others said."""
        while (candidate := await self._next()) is not None:
            answer = await (self._hedge(candidate) if self._may_hedge() else self._ask(candidate))
            if answer is not None:
                return answer
        raise self._failure()

    # --- who is asked next ---

    async def _next(self) -> Candidate | None:
        """Return the next candidate, after a pause where a new round begins; None where no more are asked."""
        if self._num_attempts >= self._route.settings.num_attempts or self._is_late():
            return None
        if (found := self._next_of_round()) is not None:
            return found
        if not self._num_attempts:
            return self._least_ill()
        if self._route.settings.retries is None or not await self._begin_round():
            return None
        return self._next_of_round()

    def _next_of_round(self) -> Candidate | None:
        """Take the next candidate of this round that may be asked."""
        while self._round:
            candidate = self._round.pop(0)
            if candidate.target.breaker.admits and self._guard.may_take(candidate.model):
                return candidate
        return None

    def _least_ill(self) -> Candidate | None:
        """Return the candidate whose breaker closes next, where no breaker admits a request."""
        fitting = [each for each in self._candidates if self._guard.may_take(each.model)]
        return min(fitting, key=lambda each: each.target.breaker.closes_in_s, default=None)

    async def _begin_round(self) -> bool:
        """Pause, and begin another round. Returns False where no target is to be asked in time."""
        self._num_rounds += 1
        delay_s = self._route.settings.retry_delay_ms / 1000 * 2.0 ** (self._num_rounds - 1) * random.uniform(0.5, 1.5)
        ends = self._clock() + min(delay_s, _MAX_PAUSE_S)
        self._round = [each for each in self._candidates if self._left_alone.get(each.target.name, 0.0) <= ends]
        if not self._round or self._is_late(ends):
            return False
        await asyncio.sleep(ends - self._clock())
        return True

    def _is_late(self, at: float | None = None) -> bool:
        """Whether the request's own deadlines have passed now, or will have at a time."""
        elapsed = (self._clock() if at is None else at) - self._started
        return any(each is not None and elapsed >= each for each in self._deadlines())

    def _deadlines(self) -> tuple[float | None, float | None]:
        return self._request.timeout_s, self._request.queue_timeout_s

    # --- one attempt ---

    async def _ask(self, candidate: Candidate) -> BegunAnswer | None:
        """Ask a candidate. Returns None where it failed and another may be asked, and raises its error where not."""
        try:
            fitted = await self._guard.fit(candidate.model, self._left_of(self._request))
            self._num_attempts += 1
            number = self._num_attempts
            self._route.note_asked(*model_and_adapter(candidate.model))
            lookup = await self._source.look_up(candidate.model, fitted)
            if lookup.event is not None:
                candidate.target.note_cached()
                return BegunAnswer(None, lookup.event, lookup, candidate, number)
            attempt = Attempt(candidate.target, partial(self._source.generate, lookup))
            return BegunAnswer(attempt, await attempt.begin(), lookup, candidate, number)
        except SluiceError as error:
            if error.is_senders_limit or not (error.exceeds_context or error.code in _GOES_ON):
                raise
            self._note(candidate, error)
            return None

    def _left_of(self, request: TextRequest) -> TextRequest:
        """Return the request with what is left of its time."""
        if not self._num_attempts or self._deadlines() == (None, None):
            return request
        elapsed = self._clock() - self._started
        timeout_s, queue_timeout_s = (
            None if each is None else max(0.001, each - elapsed) for each in self._deadlines()
        )
        return msgspec.structs.replace(request, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)

    def _note(self, candidate: Candidate, error: SluiceError) -> None:
        self._guard.note(candidate.model, error)
        self._failures.append((candidate.target.name, error))
        if error.retry_after_s is not None:
            self._left_alone[candidate.target.name] = self._clock() + error.retry_after_s

    def _failure(self) -> SluiceError:
        """Return the error where no target has answered."""
        if not self._failures:
            message = f"route {self._route.name!r}: the time of the request is over"
            return SluiceError(ErrorCode.DEADLINE, message)
        return join_failures(self._route.name, self._failures)

    # --- hedging ---

    def _may_hedge(self) -> bool:
        """Whether a second target may be asked while the first is silent."""
        settings, request = self._route.settings, self._request
        max_tokens = request.sampling.get("max_tokens", request.default_max_tokens)
        if settings.hedge_after_ms is None or max_tokens is None or self._num_attempts:
            return False
        return max_tokens <= settings.hedge_max_tokens and bool(self._round)

    async def _hedge(self, candidate: Candidate) -> BegunAnswer | None:
        """Ask a candidate, and another one too where it is silent for a while. Returns and raises as `_ask`, of the
        two."""
        running = {self._start(candidate)}
        try:
            hedge_after_s = (self._route.settings.hedge_after_ms or 0.0) / 1000
            done, _ = await asyncio.wait(running, timeout=hedge_after_s)
            second = None if done else self._next_of_round()
            if second is not None:
                running.add(self._start(second))
            answer = await self._first_of(running)
            if second is not None:
                self._route.note_hedge(is_won=answer is not None and answer.candidate is second)
            return answer
        finally:
            for task in running:
                task.cancel()
                self._route.run_apart(_discard(task))

    def _start(self, candidate: Candidate) -> "asyncio.Task[BegunAnswer | None]":
        return asyncio.create_task(self._ask(candidate), name=f"ask {candidate.target.name}")

    async def _first_of(self, running: "set[asyncio.Task[BegunAnswer | None]]") -> BegunAnswer | None:
        """Return the first answer of tasks, which is taken out of them; None where none has one."""
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                running.discard(task)
                if (answer := task.result()) is not None:
                    return answer
        return None


async def _discard(task: "asyncio.Task[BegunAnswer | None]") -> None:
    """Wait for the end of a task that was cancelled. Where it had an answer before, that is cancelled."""
    with suppress(asyncio.CancelledError, SluiceError):
        answer = await task
        if answer is not None and answer.attempt is not None:
            await answer.attempt.discard()
