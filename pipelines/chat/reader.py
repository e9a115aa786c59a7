"""Finds the parts of one answer: its reasoning first, and tool calls in the rest."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from sluice.pipelines.chat.formats import CallReader
from sluice.pipelines.chat.source import PartReader
from sluice.pipelines.text.parts import AnswerText, CallArguments, CallStart, Part
from sluice.pipelines.text.types import TextEvent, ToolChoice


class FormatReader:
    """The `ChatReader` of one answer in the formats of a model."""

    def __init__(
        self,
        open_reasoning: Callable[[str], PartReader] | None,
        calls: CallReader | None,
        *,
        choice: ToolChoice,
        relaxed: Callable[[], list[str]],
        shows_calls: bool = True,
    ) -> None:
        """`open_reasoning` takes the end of the prompt, which comes with the first event. Unless the `choice` allows
        it, calls after the first are left out: not every runtime keeps the model from making them. Where a call is
        required, all other text is a call that was cut off, and left out. `relaxed` says what calls are not held to.
        Unless `shows_calls`, all calls are left out: the client offers no tool that they could be for.
        """
        self._find_relaxed = relaxed
        self._open_reasoning = open_reasoning
        self._reasoning: PartReader | None = None
        self._calls = calls
        self._shows_calls = shows_calls
        self._is_parallel, self._has_text = choice.is_parallel, not choice.is_required
        self._token_starts: Sequence[int] = ()
        self._space: list[str] = []
        """White space at the end of the answer's text so far, which does not count in front of a call."""

    @property
    def finds_reasoning(self) -> bool:
        return self._open_reasoning is not None

    @property
    def relaxed(self) -> list[str]:
        return self._find_relaxed()

    @property
    def num_reasoning_tokens(self) -> int:
        passages = [] if self._reasoning is None else self._reasoning.reasoning
        return sum(self._count_tokens(*passage) for passage in passages)

    def _count_tokens(self, start: int, end: int) -> int:
        """Return how many tokens have characters in a passage, however they came in events."""
        starts = self._token_starts
        return bisect_left(starts, end) - max(bisect_right(starts, start) - 1, 0) if starts else 0

    def read(self, event: TextEvent) -> list[Part]:
        if event.detail is not None:
            self._token_starts = event.detail.token_starts
            if event.detail.prompt_end:
                self._open(event.detail.prompt_end)
        parts = self.feed(event.text) if event.text else []
        return parts if event.finish_reason is None else parts + self.finish()

    def feed(self, text: str) -> list[Part]:
        self._open("")
        reasoning = self._reasoning
        is_answer = reasoning is None or (reasoning.source.is_all_text and not reasoning.source.num_unread)
        return self._find_calls([AnswerText(text)] if reasoning is None or is_answer else reasoning.feed(text))

    def finish(self) -> list[Part]:
        self._open("")
        parts = self._find_calls([] if self._reasoning is None else self._reasoning.finish())
        if self._calls is not None:
            rest = self._calls.finish()
            if not self._shows_calls and any(self._is_call_cut_off(part) for part in rest):
                rest, self._space = [], []
            parts += self._hold_space(rest)
            if self._space:
                parts.append(AnswerText("".join(self._space)))
        return parts

    def _open(self, prompt_end: str) -> None:
        if self._reasoning is None and self._open_reasoning is not None:
            self._reasoning = self._open_reasoning(prompt_end)

    def _find_calls(self, parts: list[Part]) -> list[Part]:
        """Return the parts with the calls that the answer's text has."""
        if self._calls is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._hold_space(self._calls.feed(part.text)) if isinstance(part, AnswerText) else [part]
        return found

    def _is_call_cut_off(self, part: Part) -> bool:
        """Whether the last text is a call that ends before the name of its function."""
        return self._calls is not None and isinstance(part, AnswerText) and part.text.startswith(self._calls.opening)

    def _hold_space(self, parts: list[Part]) -> list[Part]:
        """Return the parts that the choice allows, without the white space in front of calls."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, CallStart | CallArguments) and part.index > 0 and not self._is_parallel:
                continue
            if isinstance(part, CallStart | CallArguments) and not self._shows_calls:
                self._space = []
                continue
            if isinstance(part, CallStart):
                self._space = []
            elif isinstance(part, AnswerText) and not self._has_text:
                continue
            elif isinstance(part, AnswerText):
                shown = part.text.rstrip()
                space = part.text[len(shown) :]
                if not shown:
                    self._space.append(space)
                    continue
                part = AnswerText("".join([*self._space, shown]))
                self._space = [space] if space else []
            found.append(part)
        return found
