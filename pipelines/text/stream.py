"""One generation's token events to text events."""

from collections.abc import Sequence

from engine.types import EventDetail, FinishReason, SamplingParams, TokenEvent
from pipelines.text.detokenizer import Detokenizer
from pipelines.text.logprobs import LogprobTrack
from pipelines.text.stop import StopStrings
from pipelines.text.types import TextEvent


class TextStream:
    """The text side of one generation: detokenizes, ends at stop strings, counts. Belongs to its task.

    The text does not depend on how tokens are merged into events; the last event says how many were used.
    Stop strings are looked for in what follows the first `min_tokens` tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: tuple[str, ...],
        sampling: SamplingParams,
        prompt_tokens: int,
        track: LogprobTrack | None = None,
    ) -> None:
        """With `track` events have a detail. Raises SluiceError INVALID for stop strings that are not allowed."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop) if stop else None
        self._stop_token_ids = sampling.stop_token_ids
        self._min_tokens = sampling.min_tokens
        self._prompt_tokens = prompt_tokens
        self._track = track
        self._cached_tokens = 0
        self._is_plain = self._stops is None and track is None
        self._completion_tokens = 0
        self._reported_tokens = 0

    def feed(self, event: TokenEvent) -> TextEvent | None:
        """The text that `event` completes; None where there is none yet. After a last event comes no other."""
        if event.detail is not None:
            self._note(event.detail)
        token_ids, finish_reason = event.token_ids, event.finish_reason
        if finish_reason is FinishReason.STOP:
            return self._finish_by_token(token_ids[:-1], token_ids[-1])
        text = self._show(token_ids)
        if self._matched is not None:
            return self._event(text, FinishReason.STOP, self._matched)
        if finish_reason is not None:
            return self._finish(text, finish_reason, None)
        return self._event(text) if text else None

    def _note(self, detail: EventDetail) -> None:
        if detail.num_cached_tokens is not None:
            self._cached_tokens = detail.num_cached_tokens
        if self._track is not None:
            self._track.expect(detail)

    def _finish_by_token(self, shown: Sequence[int], last: int) -> TextEvent:
        """The token that ended the sequence is counted, and not shown."""
        text = self._show(shown)
        if self._matched is not None:
            return self._event(text, FinishReason.STOP, self._matched)
        self._completion_tokens += 1
        if self._track is not None:
            self._track.add_end()
        return self._finish(text, FinishReason.STOP, last if last in self._stop_token_ids else None)

    def _finish(self, text: str, reason: FinishReason, stop_reason: int | None) -> TextEvent:
        tail = self._detokenizer.flush()
        if self._stops is None:
            return self._event(text + tail, reason, stop_reason)
        text += self._stops.feed(tail)
        if self._matched is not None:
            return self._event(text, FinishReason.STOP, self._matched)
        return self._event(text + self._stops.flush(), reason, stop_reason)

    @property
    def _matched(self) -> str | None:
        return self._stops.matched if self._stops is not None else None

    def _show(self, token_ids: Sequence[int]) -> str:
        if self._is_plain:
            self._completion_tokens += len(token_ids)
            return self._detokenizer.feed(token_ids)
        return self._show_each(token_ids)

    def _show_each(self, token_ids: Sequence[int]) -> str:
        """Token by token, so that the one that completes a stop string is known and the last one counted."""
        pieces = []
        for token_id in token_ids:
            self._completion_tokens += 1
            piece = self._detokenizer.feed((token_id,))
            if self._track is not None:
                self._track.add(piece)
            pieces.append(self._up_to_stop(piece))
            if self._matched is not None:
                break
        return "".join(pieces)

    def _up_to_stop(self, piece: str) -> str:
        if self._stops is None or self._completion_tokens <= self._min_tokens:
            return piece
        return self._stops.feed(piece)

    def _event(
        self, text: str, finish_reason: FinishReason | None = None, stop_reason: str | int | None = None
    ) -> TextEvent:
        total = self._completion_tokens
        num_tokens, self._reported_tokens = total - self._reported_tokens, total
        detail = None
        if self._track is not None:
            detail = self._track.take(text, finish_reason is not None and self._matched is None)
        prompt, cached = self._prompt_tokens, self._cached_tokens
        return TextEvent(text, num_tokens, prompt, total, finish_reason, stop_reason, cached, detail)
