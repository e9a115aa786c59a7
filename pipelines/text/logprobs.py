"""Log probabilities beside streamed text."""

from collections import deque
from collections.abc import Mapping

from engine.types import EventDetail, TokenLogprob
from pipelines.text.types import TextDetail, TextLogprob, TokenText


class LogprobTrack:
    """The log probabilities of one text, each told with the event in which its token's text begins.

    So a stream tells the same ones as a whole answer, and none for text that a stop string cut off.
    """

    def __init__(
        self,
        texts: Mapping[int, TokenText],
        prompt_token_ids: list[int],
        *,
        has_output: bool,
        echo_starts: list[int] | None = None,
        echo_length: int = 0,
    ) -> None:
        """Without `has_output` only the prompt's are told.

        `echo_starts` and `echo_length` say where the prompt's tokens begin and where its text ends, where it is
        part of the answer.
        """
        self._texts = texts
        self._prompt_token_ids = prompt_token_ids
        self._has_output = has_output
        self._starts = echo_starts or [0] * len(prompt_token_ids)
        self._raw: deque[TokenLogprob] = deque()
        """Those of tokens that have not been made text yet."""
        self._waiting: deque[TextLogprob] = deque()
        """Those of tokens whose text has not been shown yet."""
        self._made = self._shown = echo_length
        self._total = 0.0
        self._prompt: list[TextLogprob] | None = None

    def expect(self, detail: EventDetail) -> None:
        """The engine's entries for the tokens that are going to be added, and for the prompt's."""
        self._raw.extend(detail.logprobs or ())
        if detail.prompt_logprobs is not None:
            self._prompt = [
                TextLogprob(self._texts[token_id], None, start) if entry is None else self._readable(entry, start)
                for token_id, entry, start in zip(
                    self._prompt_token_ids, detail.prompt_logprobs, self._starts, strict=True
                )
            ]

    def add(self, piece: str) -> None:
        """One more token was turned into text, which completed `piece`."""
        if self._raw:
            entry = self._raw.popleft()
            self._total += entry.logprob
            self._waiting.append(self._readable(entry, self._made))
        self._made += len(piece)

    def add_end(self) -> None:
        """The token that ended the text and is not part of it."""
        if self._raw:
            self._total += self._raw.popleft().logprob

    def take(self, text: str, is_whole: bool) -> TextDetail:
        """What goes with an event that shows `text`; `is_whole` where nothing was cut off and no more comes."""
        self._shown += len(text)
        told = []
        while self._waiting and (is_whole or self._waiting[0].start < self._shown):
            told.append(self._waiting.popleft())
        prompt, self._prompt = self._prompt, None
        return TextDetail(told if self._has_output else None, self._total, prompt)

    def _readable(self, entry: TokenLogprob, start: int) -> TextLogprob:
        texts = self._texts
        top = tuple((texts[token_id], logprob) for token_id, logprob in entry.top)
        return TextLogprob(texts[entry.token_id], entry.logprob, start, top)
