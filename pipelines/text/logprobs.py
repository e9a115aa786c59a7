"""Additions to an answer's new text: log probabilities of its tokens, and an echo of the prompt."""

from collections import deque
from collections.abc import Mapping

import msgspec

from sluice.engine.types import EventDetail, FinishReason, SamplingParams, TokenLogprob
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import ENDED_EARLY, PlainPrompt, TextDetail, TextEvent, TextLogprob, TokenText


class LogprobTracker:
    """Hands out the log probabilities of one text, each with the event in which its token's text begins. So a stream
    has the same ones as a whole answer, and none for text that a stop string cut off."""

    def __init__(
        self,
        texts: Mapping[int, TokenText],
        prompt_token_ids: list[int],
        *,
        has_output: bool,
        echo_starts: list[int] | None = None,
        echo_length: int = 0,
    ) -> None:
        """Without `has_output` hand out those of the prompt alone. `echo_starts` and `echo_length` are the offsets of
        the prompt's tokens and the length of its text, in characters, where the answer begins with the prompt."""
        self._texts = texts
        self._prompt_token_ids = prompt_token_ids
        self._has_output = has_output
        self._starts = echo_starts or [0] * len(prompt_token_ids)
        self._raw: deque[TokenLogprob] = deque()
        """Entries of tokens that have not been detokenized yet."""
        self._waiting: deque[TextLogprob] = deque()
        """Entries of tokens whose text has not been shown yet."""
        self._made = self._shown = echo_length
        self._total = 0.0
        self._prompt: list[TextLogprob] | None = None

    def expect(self, detail: EventDetail) -> None:
        """Take the engine's entries for the tokens that `add` will follow with, and for the prompt's tokens."""
        self._raw.extend(detail.logprobs or ())
        if detail.prompt_logprobs is not None:
            self._prompt = [
                TextLogprob(self._texts[token_id], None, start) if entry is None else self._readable(entry, start)
                for token_id, entry, start in zip(
                    self._prompt_token_ids, detail.prompt_logprobs, self._starts, strict=True
                )
            ]

    def add(self, piece: str) -> None:
        """Note that one more token was detokenized, and completed the text `piece`."""
        if self._raw:
            entry = self._raw.popleft()
            self._total += entry.logprob
            self._waiting.append(self._readable(entry, self._made))
        self._made += len(piece)

    def add_end(self) -> None:
        """Note the token that ended the text and is not part of it."""
        if self._raw:
            self._total += self._raw.popleft().logprob

    def take(self, text: str, is_whole: bool) -> TextDetail:
        """Return the detail of an event that shows `text`. `is_whole`: the text ends here and nothing was cut off."""
        self._shown += len(text)
        entries = []
        while self._waiting and (is_whole or self._waiting[0].start < self._shown):
            entries.append(self._waiting.popleft())
        prompt, self._prompt = self._prompt, None
        return TextDetail(entries if self._has_output else None, self._total, prompt)

    def _readable(self, entry: TokenLogprob, start: int) -> TextLogprob:
        texts = self._texts
        top = tuple((texts[token_id], logprob) for token_id, logprob in entry.top)
        return TextLogprob(texts[entry.token_id], entry.logprob, start, top)


class PromptEcho:
    """Puts a prompt's text, and the log probabilities of its tokens, in front of those of the first event."""

    def __init__(self, tokenizer: Tokenizer, source: PlainPrompt, token_ids: list[int]) -> None:
        """Echo text as it was sent, and token ids as the text that they stand for; the engine refuses those that stand
        for none."""
        detokenizer, known = tokenizer.detokenizer(), range(1 << 32)  # tokenizers take no others
        pieces = [detokenizer.feed((token_id,)) if token_id in known else "" for token_id in token_ids]
        pieces.append(detokenizer.flush())
        self.text = source if isinstance(source, str) else "".join(pieces)
        self._pieces = pieces

    def token_starts(self) -> list[int]:
        """Return each token's offset in characters; the last are approximate where the tokenizer changes the length."""
        starts, num_chars = [], 0
        for piece in self._pieces[:-1]:
            starts.append(min(num_chars, len(self.text)))
            num_chars += len(piece)
        return starts

    def prepend_to(self, event: TextEvent) -> TextEvent:
        """Return the first event with the prompt in front."""
        detail = event.detail
        if detail is not None and detail.logprobs is not None:
            entries = [*(detail.prompt_logprobs or ()), *detail.logprobs]
            detail = msgspec.structs.replace(detail, logprobs=entries)
        return msgspec.structs.replace(event, text=self.text + event.text, detail=detail)

    def alone(self, event: TextEvent) -> TextEvent:
        """Return the event of a prompt without an answer, from the one that ended an answer of one token: the engine
        generates at least that."""
        detail = event.detail
        if detail is not None and detail.logprobs is not None:
            detail = msgspec.structs.replace(detail, logprobs=detail.prompt_logprobs, total_logprob=0.0)
        if detail is not None and detail.token_ids is not None:
            detail = msgspec.structs.replace(detail, token_ids=[])
        reason = event.finish_reason if event.finish_reason in ENDED_EARLY else FinishReason.LENGTH
        return TextEvent(self.text, 0, event.prompt_tokens, 0, reason, None, event.cached_tokens, detail)


def track_logprobs(
    sampling: SamplingParams, tokenizer: Tokenizer, token_ids: list[int], echo: PromptEcho | None
) -> LogprobTracker:
    """Return the tracker of an answer to a prompt of `token_ids`, with log probabilities of either or of both."""
    has_output = sampling.logprobs is not None
    starts, length = (None, 0) if echo is None else (echo.token_starts(), len(echo.text))
    return LogprobTracker(
        tokenizer.token_texts, token_ids, has_output=has_output, echo_starts=starts, echo_length=length
    )
