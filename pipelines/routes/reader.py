"""The reader of an answer of which it is not known beforehand which target gives it."""

from collections.abc import Mapping

from sluice.pipelines.text.parts import AnswerText, ChatReader, Part
from sluice.pipelines.text.types import TextEvent


class RouteReader:
    """Reads with the reader of the target that the first event names."""

    def __init__(self, readers: Mapping[str, ChatReader | None]) -> None:
        """`readers` are those of the targets, at least one of which has a reader; None for answers of text alone."""
        self._readers = readers
        self._chosen: ChatReader | None = None

    @property
    def finds_reasoning(self) -> bool:
        return any(each is not None and each.finds_reasoning for each in self._readers.values())

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._chosen is None else self._chosen.num_reasoning_tokens

    @property
    def relaxed(self) -> list[str]:
        """What any of the targets does not hold calls to."""
        relaxed = [what for each in self._readers.values() if each is not None for what in each.relaxed]
        return list(dict.fromkeys(relaxed))

    def read(self, event: TextEvent) -> list[Part]:
        if event.detail is not None and event.detail.target:
            self._chosen = self._readers[event.detail.target]
        if self._chosen is None:
            return [AnswerText(event.text)] if event.text else []
        return self._chosen.read(event)

    def feed(self, text: str) -> list[Part]:
        if self._chosen is None:
            return [AnswerText(text)] if text else []
        return self._chosen.feed(text)

    def finish(self) -> list[Part]:
        return [] if self._chosen is None else self._chosen.finish()
