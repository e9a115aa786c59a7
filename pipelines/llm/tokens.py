"""Generation with token ids as output, and token sequences as stop words."""

from collections.abc import Sequence

import msgspec

from sluice.engine.client.stream import Consumer, GenerationStream
from sluice.engine.types import FinishReason, TokenEvent
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.consumers import ObserveDetail
from sluice.pipelines.text.sampling import default_max_tokens
from sluice.pipelines.text.stream import StreamRecord, check_complete
from sluice.pipelines.text.types import TextDetail, TextEvent, TextRequest

TokenSequences = tuple[tuple[int, ...], ...]
"""Words as token ids."""


class TokenPiece(TextEvent, frozen=True, gc=False):
    """Some tokens of a generation. `text` is empty; the counts are those of any text event. The token that ended the
    sequence (end of sequence) is counted but not in `token_ids`, as in TensorRT-LLM. `log_probs` belong to `token_ids`;
    they are empty where the request did not ask for them."""

    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()


class StopSequences:
    """Finds where a stop sequence is complete. One that ends within the first `min_tokens` tokens does not count."""

    def __init__(self, sequences: TokenSequences, min_tokens: int) -> None:
        self._sequences = [list(sequence) for sequence in sequences]
        self._longest = max(map(len, sequences), default=0)
        self._min_tokens = min_tokens
        self._num_seen = 0
        self._tail: list[int] = []

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of `token_ids` complete a sequence, or None. They follow those of earlier calls."""
        if not self._sequences:
            return None
        for index, token_id in enumerate(token_ids):
            self._num_seen += 1
            self._tail.append(token_id)
            is_counted = self._num_seen > self._min_tokens
            if is_counted and any(self._tail[-len(sequence) :] == sequence for sequence in self._sequences):
                return index + 1
        del self._tail[: -self._longest]
        return None


async def generate_tokens(
    text: LlmText,
    request: TextRequest,
    consumer: Consumer[TextEvent],
    stop: TokenSequences = (),
    bad: TokenSequences = (),
    on_detail: ObserveDetail | None = None,
) -> None:
    """Push the pieces up to and including the first of the `stop` sequences, without any of the `bad` ones. As with
    `LlmText.generate`, the last piece has the finish reason, cancelling the coroutine cancels the request, and a
    refusal is raised. Stop strings of `request` are not searched."""
    with default_max_tokens(request), text.measure(request) as record:
        request = await text.wake_engine(request)
        prompt = await text.prepare_shared(request.prompt)
        sampling = await text.sampling(request, len(prompt.token_ids))
        if bad:
            sampling = msgspec.structs.replace(sampling, bad_words=(*sampling.bad_words, *bad))
        weight = await record.admit(len(prompt.token_ids), sampling.max_tokens, request.adapter)
        stops = StopSequences(stop, sampling.min_tokens)
        with text.activity.follow(text.submit(request, prompt, sampling, weight=weight)) as generation:
            await generation.pass_to(_Pieces(text, generation, record, consumer, stops, on_detail))


class _Pieces:
    """Passes on pieces of the events of one generation, and counts tokens."""

    def __init__(
        self,
        text: LlmText,
        generation: GenerationStream,
        record: StreamRecord,
        consumer: Consumer[TextEvent],
        stops: StopSequences,
        on_detail: ObserveDetail | None,
    ) -> None:
        self._count_answer = text.activity.count_answer
        self._generation = generation
        self._record = record
        self._pass_on = consumer.take
        self.ready = consumer.ready
        self._stops = stops
        self._on_detail = on_detail
        self._num_tokens = 0
        self._num_cached = 0
        self._total_log_prob: float | None = None

    def take(self, event: TokenEvent) -> bool:
        if self._on_detail is not None and event.detail is not None:
            self._on_detail(event.detail)
        piece = self._piece(event)
        if piece.finish_reason is not None:
            self._generation.stop()
            check_complete(piece)
            self._count_answer(piece.prompt_tokens, piece.completion_tokens)
        self._record.observe(piece)
        return self._pass_on(piece)

    def _piece(self, event: TokenEvent) -> TokenPiece:
        token_ids, reason = event.token_ids, event.finish_reason
        num_shown = len(token_ids) - (reason is FinishReason.STOP)
        end = self._stops.find(token_ids[:num_shown])
        if end is not None:
            token_ids, num_shown, reason = token_ids[:end], end, FinishReason.STOP
        log_probs = self._log_probs(event, len(token_ids))
        self._num_tokens += len(token_ids)
        return TokenPiece(
            text="",
            num_tokens=len(token_ids),
            prompt_tokens=len(self._generation.request.prompt_token_ids),
            completion_tokens=self._num_tokens,
            finish_reason=reason,
            cached_tokens=self._num_cached,
            detail=None if self._total_log_prob is None else TextDetail(total_logprob=self._total_log_prob),
            token_ids=token_ids[:num_shown],
            log_probs=log_probs[:num_shown],
        )

    def _log_probs(self, event: TokenEvent, num_tokens: int) -> list[float]:
        detail = event.detail
        if detail is None:
            return []
        if detail.num_cached_tokens is not None:
            self._num_cached = detail.num_cached_tokens
        if detail.logprobs is None:
            return []
        log_probs = [entry.logprob for entry in detail.logprobs[:num_tokens]]
        self._total_log_prob = (self._total_log_prob or 0.0) + sum(log_probs)
        return log_probs
