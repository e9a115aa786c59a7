"""Control tokens of a language model (`<|end|>`) in texts that are data: they are written so that they are words.

A document that could end its own turn and begin another one would speak with the voice of the user or the system.
"""

import re
from collections.abc import Iterable
from typing import Any

from pipelines.text.tokenizer import Tokenizer

_MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)
"""Added tokens like <think> and [TOOL_CALLS] steer a model, though its tokenizer need not call them special."""

USUAL = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|</?s>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<</?SYS>>"
    r"|<(?:start|end)_of_turn>|<(?:bos|eos|pad)>|</?(?:think|tool_call|tool_response)>"
)
"""Those of well-known chat models, for one whose tokenizer is not here."""


class ControlTokens:
    """Finds them in texts. Cheap where there is none, as nearly always."""

    def __init__(self, pattern: re.Pattern[str] | None, normalizer: Any = None) -> None:
        """`normalizer` is the tokenizer's, where it looks for such tokens in what that makes of a text."""
        self._pattern = pattern
        self._normalizer = normalizer

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ControlTokens":
        """All that the tokenizer would find in a text."""
        added = [token for token in tokenizer.added_tokens if _steers(token)]
        is_normalized = any(token.normalized for token in added)
        return cls(_any_of(token.content for token in added), tokenizer.normalizer if is_normalized else None)

    def defused(self, text: str) -> str:
        """The text with a space after the first character of each: it reads the same, and no token is made of it."""
        if self._pattern is None:
            return text
        if self._normalizer is not None:
            normal = self._normalizer.normalize_str(text)
            text = normal if self._pattern.search(normal) else text
        # A token may be all that stands between the halves of another one.
        while self._pattern.search(text):
            text = self._pattern.sub(_broken, text)
        return text


def _steers(token: Any) -> bool:
    return bool(token.content.strip()) and (token.special or _MARKUP.fullmatch(token.content) is not None)


def _any_of(contents: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _broken(match: re.Match[str]) -> str:
    found = match.group()
    return f"{found[0]} {found[1:]}" if len(found) > 1 else ""
