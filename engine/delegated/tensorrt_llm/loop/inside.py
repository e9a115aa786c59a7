"""The requests that TensorRT-LLM has: a task each, which reads its responses from the hand-over to the last one."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

from engine.delegated.tensorrt_llm.loop.events import News
from engine.delegated.tensorrt_llm.loop.failures import failure, internal, is_fatal, is_response, refusal
from engine.delegated.tensorrt_llm.loop.llm import Llm
from engine.delegated.tensorrt_llm.loop.sequence import LlmSequence
from engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

JUDGEMENT_S = 0.25
"""How long after a request's error the engine's health is asked for: when all is lost, errors come first, and requests
that were answered with one would not go on in the next engine."""
ABORT_GRACE_S = 10.0
"""How long the last response to an aborted request is awaited."""


class Listener(Protocol):
    """Who is told. For each sequence `on_left` comes last; before it, unless it was aborted, `on_failure` or news with
    a finish reason."""

    def on_response(self) -> None:
        """TensorRT-LLM has said something."""
        ...

    def on_news(self, sequence: LlmSequence, news: News) -> None: ...

    def on_failure(self, sequence: LlmSequence, error: SluiceError) -> None: ...

    def on_left(self, sequence: LlmSequence) -> None:
        """TensorRT-LLM holds nothing for it any more."""
        ...

    def on_lost(self, error: Exception) -> None:
        """Nothing will come any more."""
        ...


class Inside:
    """In the order of coming. One that was aborted stays until its last response: only then are its blocks free."""

    def __init__(self, llm: Llm, listener: Listener, clock: Callable[[], float]) -> None:
        self._llm = llm
        self._listener = listener
        self._clock = clock
        self._sequences: dict[int, LlmSequence] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, stream_id: int) -> LlmSequence | None:
        return self._sequences.get(stream_id)

    @property
    def sequences(self) -> Collection[LlmSequence]:
        return self._sequences.values()

    def start(self, sequence: LlmSequence) -> None:
        """Hand it to TensorRT-LLM. What that raises the listener hears of."""
        call, sequence.call = sequence.call, None
        try:
            sequence.output = self._llm.generate(call)
        except Exception as error:
            course = self._judge(sequence, error, refusal(error))
        else:
            course = self._read(sequence)
        task = asyncio.create_task(course, name=f"request-{sequence.request.request_id}")
        self._sequences[sequence.stream_id], self._tasks[sequence.stream_id] = sequence, task
        task.add_done_callback(lambda done: self._leave(sequence, done))

    def abort(self, sequence: LlmSequence) -> None:
        """End it in TensorRT-LLM; what still comes of it is for nobody."""
        if sequence.output is None or sequence.output.finished:
            return
        sequence.aborted_at = self._clock()
        try:
            sequence.output.abort()
        except Exception as error:
            log.warning("request %s could not be aborted: %s", sequence.request.request_id, error)

    def forget_lost(self, now: float) -> bool:
        """An aborted request whose last response does not come keeps its blocks from others no longer.

        Returns whether there was one: then perhaps nothing comes any more, and nobody is there to miss it.
        """
        aborted = [each for each in self._sequences.values() if each.aborted_at is not None]
        lost = [each for each in aborted if now - (each.aborted_at or 0.0) > ABORT_GRACE_S]
        for sequence in lost:
            log.warning("TensorRT-LLM did not end the aborted request %s", sequence.request.request_id)
            self._tasks[sequence.stream_id].cancel()
        return bool(lost)

    async def close(self) -> None:
        """Read no more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, sequence: LlmSequence) -> None:
        try:
            async for output in sequence.output:
                self._listener.on_response()
                if not sequence.is_told:
                    self._take(sequence, output)
            if not sequence.is_told:
                raise RuntimeError("its responses ended without a finish reason")
        except Exception as error:
            sequence.output = None
            await self._judge(sequence, error, failure(error))

    def _take(self, sequence: LlmSequence, output: Any) -> None:
        try:
            news = sequence.reader.read(output)
        except SluiceError as error:
            self._listener.on_failure(sequence, error)
            return
        except Exception:  # it would go on in TensorRT-LLM unless it were aborted
            log.exception("a response to request %s cannot be read", sequence.request.request_id)
            self._listener.on_failure(sequence, internal())
            return
        if news.finish_reason is FinishReason.CANCELLED:
            raise RuntimeError("TensorRT-LLM cancelled the request of its own accord")
        if not news.is_empty:
            self._listener.on_news(sequence, news)
        if output.finished:  # its place is free in the statistics that go out with its last event
            self._drop(sequence)

    async def _judge(self, sequence: LlmSequence, error: Exception, answer: SluiceError) -> None:
        """`error` is the engine's end, or that of this request, which is told `answer`."""
        if is_fatal(error):
            self._listener.on_lost(error)
            return
        if sequence.is_told:
            return
        if answer.code is ErrorCode.INTERNAL:
            trace = None if is_response(error) else error
            log.error("request %s failed in TensorRT-LLM: %s", sequence.request.request_id, error, exc_info=trace)
            await asyncio.sleep(JUDGEMENT_S)
            if not self._llm.is_healthy():
                self._listener.on_lost(error)
                return
        self._listener.on_failure(sequence, answer)

    def _leave(self, sequence: LlmSequence, done: "asyncio.Task[None]") -> None:
        """Its task is done."""
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log.error("reading request %s failed", sequence.request.request_id, exc_info=error)
            self._listener.on_failure(sequence, internal())
        self._drop(sequence)

    def _drop(self, sequence: LlmSequence) -> None:
        if self._sequences.pop(sequence.stream_id, None) is not None:
            del self._tasks[sequence.stream_id]
            self._listener.on_left(sequence)
