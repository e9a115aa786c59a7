# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""A request's state between iterations."""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..bindings.executor import FinishReason, RequestPerfMetrics
from .kv_cache import Prefix
from .responses import Likeliest, Response, SequenceResponse
from .schedulers import Load
from .settings import settings
from .tokens import Model


@dataclass(slots=True)
class Order:
    """A checked call of `generate_async`."""

    request_id: int
    prompt_token_ids: list[int]
    sampling_params: Any
    streaming: bool
    end_id: int | None
    max_tokens: int
    adapter: int
    salt: str
    images: int = 0
    """A number of the prompt's images, 0 for none. It shifts the answer, as an adapter does."""
    are_images_hashed: bool = True
    """Whether other images have other KV blocks."""
    priority: float = 0.5
    conversation: str | None = None
    disaggregated_params: Any = None

    def is_part(self, kind: str) -> bool:
        return self.disaggregated_params is not None and self.disaggregated_params.request_type == kind


@dataclass(slots=True)
class Sequence:
    """One of a request's outputs."""

    index: int
    token_ids: list[int]
    """Prompt and output, the end token included."""
    shown: list[int] = field(default_factory=list)
    """The output as responses tell it."""
    num_sent: int = 0
    logprobs: list[Likeliest] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None


class Work:
    """One request in the executor."""

    def __init__(
        self, order: Order, model: Model, stream_interval: int, *, has_end_token: bool, has_one_logprob: bool
    ) -> None:
        params = order.sampling_params
        self.order = order
        self.num_cached = self.num_reused_blocks = self.num_missed_blocks = 0
        self.prefix = Prefix((), 0, None)
        self.arrival = time.monotonic()
        self.first_scheduled = self.first_token = self.last_token = 0.0
        self.first_iteration = self.last_iteration = 0
        self.disaggregated_params: Any = None
        """The parameters that the generation server is to get."""
        self.is_fetched = order.is_part("generation_only")
        """Whether a context server computes its context."""
        self._model = model
        self._params = params
        self._stream_interval = stream_interval
        self._has_end_token = has_end_token
        self._num_logprobs = 0 if has_one_logprob else params.logprobs or 0
        self._stops = {tuple(ids) for _, ids in params._stop_words()}
        self._num_steps = 0
        self.sequences = [Sequence(index, order.prompt_token_ids.copy()) for index in range(params.best_of)]
        self.load = Load(
            request_id=order.request_id,
            num_prompt=len(order.prompt_token_ids),
            max_new_tokens=order.max_tokens,
            beam_width=params.best_of,
            adapter=order.adapter or None,
        )

    @property
    def context(self) -> list[int]:
        """The tokens that it computes before it generates."""
        return self.sequences[0].token_ids[: self.load.num_prompt]

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def start_again(self) -> None:
        """Paused: its cache is gone, and prompt and output are a new context."""
        load = self.load
        load.num_prompt += load.num_generated
        load.max_new_tokens -= load.num_generated
        load.num_generated = load.num_prefilled = load.held_per_beam = 0
        self.num_cached = 0

    def generate(self, iteration: int) -> None:
        """One token for each sequence that goes on."""
        now = time.monotonic()
        self.first_token = self.first_token or now
        self.first_iteration = self.first_iteration or iteration
        self.last_token, self.last_iteration = now, iteration
        self.load.num_generated += 1
        self._num_steps += 1
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                self._append(sequence)

    def go_on_from(self, context: list[int], iteration: int) -> None:
        """Begin with a context server's context and first token. Its log probabilities come with the parameters, where
        the version has them there."""
        self.load.num_prefilled, self.load.num_generated, self._num_steps = self.load.num_prompt, 1, 1
        self.first_iteration = self.last_iteration = iteration
        self.first_token = self.last_token = time.monotonic()
        [token], [sequence] = self.order.disaggregated_params.first_gen_tokens, self.sequences
        sequence.token_ids = [*context, token]
        sequence.shown.append(token)
        for entry in getattr(self.order.disaggregated_params, "first_gen_log_probs", None) or ():
            sequence.logprobs.append([(token_id, each.logprob, each.rank) for token_id, each in entry.items()])
        sequence.finish_reason = self._reason(sequence, len(context), is_end=token == self.order.end_id)

    def _append(self, sequence: Sequence) -> None:
        num_prompt = len(self.order.prompt_token_ids)
        shift = self.order.adapter + self.order.images
        token, likeliest = self._model.next(sequence.token_ids, num_prompt, self._params, shift, sequence.index)
        sequence.token_ids.append(token)
        is_end = token == self.order.end_id
        if not is_end or self._has_end_token:
            sequence.shown.append(token)
            likely = self._model.logprobs(likeliest, token, self._num_logprobs)
            sequence.logprobs.append(likely)
            sequence.cumulative_logprob += next(value for each, value, _ in likely if each == token)
        sequence.finish_reason = self._reason(sequence, num_prompt, is_end=is_end)

    def _reason(self, sequence: Sequence, num_prompt: int, *, is_end: bool) -> FinishReason | None:
        """In the samplers' order: what ends in a stop word at the last token that is allowed ends by its length."""
        output = sequence.token_ids[num_prompt:]
        if is_end:
            return FinishReason.END_ID
        if len(output) >= self.order.max_tokens:
            return FinishReason.LENGTH
        is_stopped = any(tuple(output[-len(stop) :]) == stop for stop in self._stops)
        return FinishReason.STOP_WORDS if is_stopped else None

    def cancel(self) -> None:
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or FinishReason.CANCELLED

    @property
    def has_response(self) -> bool:
        """Whether this step's tokens are told now."""
        if self.is_finished or not self.order.streaming:
            return self.is_finished
        return self._num_steps == 1 or self._num_steps % self._stream_interval == 0

    def response(self, iteration: int) -> Response:
        sequences = [self._told(sequence) for sequence in self.sequences]
        wants_prompt = self._params.prompt_logprobs is not None
        wants_metrics = self.is_finished and self._params.return_perf_metrics
        return Response(
            sequences=sequences,
            is_final=self.is_finished,
            iteration=iteration,
            cached_tokens=self.num_cached,
            prompt_logprobs=self._prompt_logprobs() if wants_prompt else None,
            perf_metrics=self._perf_metrics() if wants_metrics else None,
            disaggregated_params=self.disaggregated_params,
        )

    def _told(self, sequence: Sequence) -> SequenceResponse:
        new, fresh = sequence.shown[sequence.num_sent :], sequence.logprobs[sequence.num_sent :]
        sequence.num_sent = len(sequence.shown)
        has_sum = self._params.logprobs is not None or len(self.sequences) > 1
        total = sequence.cumulative_logprob if has_sum else None
        return SequenceResponse(new, sequence.shown.copy(), fresh, total, sequence.finish_reason)

    def _prompt_logprobs(self) -> list[Likeliest]:
        """For each token of the prompt but the first, in its place; the last entry is for what follows. Those of reused
        blocks are not computed, and missing."""
        prompt = self.order.prompt_token_ids
        told = []
        for place in range(1 + self.num_cached, len(prompt) + 1):
            _, likeliest = self._model.next(prompt[:place], place, self._params, self.order.adapter, 0)
            following = prompt[place] if place < len(prompt) else likeliest
            told.append(self._model.logprobs(likeliest, following, self._params.prompt_logprobs or 0))
        return told

    def _perf_metrics(self) -> RequestPerfMetrics:
        told = RequestPerfMetrics(first_iter=self.first_iteration, last_iter=self.last_iteration)
        for name in ("arrival", "first_scheduled", "first_token", "last_token"):
            own = "arrival" if name == "arrival" else name
            setattr(told.timing_metrics, f"{name}_time", timedelta(seconds=getattr(self, own)))
        size = self.load.held_per_beam
        told.kv_cache_metrics.num_total_allocated_blocks = size
        told.kv_cache_metrics.num_new_allocated_blocks = size - self.num_reused_blocks
        told.kv_cache_metrics.num_reused_blocks = self.num_reused_blocks
        told.kv_cache_metrics.num_missed_blocks = self.num_missed_blocks
        touched = self.num_reused_blocks + self.num_missed_blocks
        told.kv_cache_metrics.kv_cache_hit_rate = self.num_reused_blocks / touched if touched else 0.0
        return told


def shows_end_token(*, is_engine: bool) -> bool:
    """The sampler in PyTorch keeps the end token in the output; the C++ decoder counts only what comes before."""
    told = settings().end_token
    return told == "in" or (told == "auto" and not is_engine)
