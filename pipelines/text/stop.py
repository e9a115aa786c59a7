"""Stop strings in streamed text."""

from sluice.errors import invalid

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
"""Characters. Both limits bound what one piece of text costs to search."""


class StopStrings:
    """Passes text on up to the first stop string, however the text is cut into pieces.

    First is the stop string that is complete first; of several complete at the same character, the longest.
    What could be the beginning of a stop string is kept back, and no more than that.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        """Raises SluiceError INVALID where a string is empty or too long, or there are too many."""
        _check(strings)
        self._strings = strings
        self._first_chars = frozenset(string[0] for string in strings)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found. The text ends before it; nothing may be fed any more."""
        return self._matched

    def feed(self, piece: str) -> str:
        """The text that certainly stands before any stop string."""
        if not self._held and self._first_chars.isdisjoint(piece):
            return piece
        text = self._held + piece
        found = [(start + len(s), start, s) for s in self._strings if (start := text.find(s)) >= 0]
        if found:
            _, kept, self._matched = min(found)
            self._held = ""
        else:
            kept = min((_start_of_partial(text, s) for s in self._strings), default=len(text))
            self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """What was kept back, at the end of the text."""
        text, self._held = self._held, ""
        return text


def _start_of_partial(text: str, string: str) -> int:
    """Where the longest end of `text` that begins `string` starts; len(text) if none does."""
    start = text.find(string[0], max(0, len(text) - len(string) + 1))
    while start >= 0:
        if string.startswith(text[start:]):
            return start
        start = text.find(string[0], start + 1)
    return len(text)


def _check(strings: tuple[str, ...]) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise invalid(
                "stop", f"stop[{index}] has {len(string)} characters; from 1 to {MAX_STOP_LENGTH} are allowed"
            )
