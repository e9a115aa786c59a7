# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The results of a request, response by response."""

import json
import queue
import weakref
from dataclasses import dataclass, field
from typing import Any

from .._stand_in.responses import Response, ResponseQueue
from .._stand_in.settings import settings
from .._stand_in.specifications import declared
from ..bindings.executor import FinishReason, RequestPerfMetrics
from .utils import RequestError

_NO_LOOP = "The asyncio event loop was not present during initialization, so async operations are not available."
_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.NOT_FINISHED: "not_finished",
}


@dataclass(slots=True)
class Logprob:
    """Log probability of a token and its place among all."""

    logprob: float
    rank: int | None = None


@declared("completion_output")
@dataclass(slots=True)
class CompletionOutput:
    """One output of a request. Everything grows; the `*_diff` properties hold what the last response brought."""

    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Any = field(default_factory=list)
    prompt_logprobs: Any = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: Any = None
    request_perf_metrics: RequestPerfMetrics | None = None
    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)
    _postprocess_result: Any = None

    @property
    def length(self) -> int:
        return len(self.token_ids or ())

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return (self.token_ids or [])[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> Any:
        return self.logprobs[self._last_logprobs_len :]


class GenerationResult:
    """A request under way. To iterate over it (`for`, `async for`) gives the same object after each response."""

    def __init__(self, request: Any, executor: Any) -> None:
        self._generation_request = request
        self._executor: weakref.ReferenceType[Any] = weakref.ref(executor)
        self._sampling_params = request.sampling_params
        self._streaming = request.streaming
        self._queue: ResponseQueue[Response] = ResponseQueue()
        self._outputs = [CompletionOutput(i) for i in range(request.sampling_params.best_of)]
        self._done = False
        self._aborted = False
        self.decoding_iter = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[str, float] = {}
        self.disaggregated_params: Any = getattr(request, "disaggregated_params", None)
        if settings().has("cached_tokens"):
            self.cached_tokens = 0

    @property
    def request_id(self) -> int:
        return int(self._generation_request.request_id)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self._generation_request.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self._done

    @property
    def context_logits(self) -> Any:
        return None

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The best n sequences; where more were tried, those of the highest log probability."""
        params = self._sampling_params
        if params.use_beam_search or params.n == params.best_of:
            return self._outputs[: params.n]
        best = sorted(self._outputs, key=lambda each: each.cumulative_logprob or float("-inf"), reverse=True)
        for index, output in enumerate(best):
            output.index = index
        return best[: params.n]

    def abort(self) -> None:
        """Ask for its end; a last response with the finish reason "cancelled" follows."""
        executor = self._executor()
        assert executor is not None, "The executor is not set for this result."
        executor.abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    def clear_logprob_params(self) -> None: ...

    def record_stats(self, output: CompletionOutput, stats: dict[str, float] | None = None) -> None:
        self.metrics_dict = dict(stats or {})

    def result(self, timeout: float | None = None) -> "GenerationResult":
        """Wait for its end, however long: the timeout is not looked at, as in the versions read."""
        while not self._done:
            self._take(self._queue.get())
        return self

    async def aresult(self) -> "GenerationResult":
        while not self._done:
            await self._step()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __iter__(self) -> "GenerationResult":
        return self

    def __next__(self) -> "GenerationResult":
        if self._done:
            raise StopIteration
        self._take(self._queue.get())
        return self

    def __aiter__(self) -> "GenerationResult":
        return self

    async def __anext__(self) -> "GenerationResult":
        if self._done:
            raise StopAsyncIteration
        await self._step()
        return self

    async def _step(self) -> None:
        assert self._queue.has_loop, _NO_LOOP
        self._take(await self._queue.aget())

    def _take(self, response: Response) -> None:
        if response.error is not None:
            # The request counts as under way still, as in the real one: whoever asks on waits for ever.
            raise (RequestError if response.is_only_this_request else RuntimeError)(response.error)
        self._done = response.is_final
        self.decoding_iter = response.iteration
        if hasattr(self, "cached_tokens"):
            self.cached_tokens = response.cached_tokens
        if response.disaggregated_params is not None:
            self.disaggregated_params = response.disaggregated_params
        for output, sequence in zip(self._outputs, response.sequences, strict=True):
            output.disaggregated_params = self.disaggregated_params
            self._extend(output, sequence, response)
        if response.disaggregated_params is not None and hasattr(self.disaggregated_params, "first_gen_log_probs"):
            self.disaggregated_params.first_gen_log_probs = list(self._outputs[0].logprobs) or None
        self._detokenize()

    def _extend(self, output: CompletionOutput, sequence: Any, response: Response) -> None:
        assert output.token_ids is not None
        output._last_token_ids_len = len(output.token_ids)
        output._last_logprobs_len = len(output.logprobs)
        if self._sampling_params.use_beam_search:
            output.token_ids = sequence.all_token_ids
        else:
            output.token_ids.extend(sequence.new_token_ids)
        if self._sampling_params.logprobs is not None:
            output.logprobs.extend(map(_logprobs, sequence.logprobs))
        if response.prompt_logprobs is not None:
            output.prompt_logprobs = list(map(_logprobs, response.prompt_logprobs))
        output.cumulative_logprob = sequence.cumulative_logprob
        if response.perf_metrics is not None:
            output.request_perf_metrics = response.perf_metrics
        if sequence.finish_reason is not None and (self._done or sequence.finish_reason is FinishReason.CANCELLED):
            self._finish(output, sequence.finish_reason)

    def _finish(self, output: CompletionOutput, reason: FinishReason) -> None:
        output.finish_reason = _REASONS[reason]
        if reason is not FinishReason.STOP_WORDS:
            return
        assert output.token_ids is not None
        for stop_reason, stop_ids in self._sampling_params._stop_words():
            if output.token_ids[-len(stop_ids) :] == stop_ids:
                output.stop_reason = stop_reason
                if not self._sampling_params.include_stop_str_in_output:
                    output.token_ids = output.token_ids[: -len(stop_ids)]
                return

    def _detokenize(self) -> None:
        """Only a RequestOutput has a tokenizer."""

    def __hash__(self) -> int:
        return hash(self.request_id)


def _logprobs(likeliest: list[tuple[int, float, int]]) -> dict[int, Logprob]:
    return {token_id: Logprob(logprob, rank) for token_id, logprob, rank in likeliest}


class IterationResult:
    """Statistics or events as they come. A wait longer than the timeout ends it, until another request is submitted."""

    def __init__(self) -> None:
        self._done = False
        self._timeout: float | None = 2
        self._queue: ResponseQueue[str] = ResponseQueue()

    def set_timeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def mark_undone(self) -> None:
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        results = []
        while not self._done:
            try:
                results.append(json.loads(self._queue.get(timeout=self._timeout)))
            except queue.Empty:
                self._done = True
        return results

    def __aiter__(self) -> "IterationResult":
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        assert self._queue.has_loop, _NO_LOOP
        try:
            told: dict[str, Any] = json.loads(await self._queue.aget(self._timeout))
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
        return told
