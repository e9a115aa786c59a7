"""Earlier turns of a conversation, as a request parameter gives them."""

from collections.abc import Sequence

from pipelines.text.text_tensors import decode_messages
from pipelines.text.tokenizer import ROLES
from pipelines.text.types import ChatMessage
from sluice.errors import SluiceError, invalid

PARAMETER = "history"
_MAX_MESSAGES = 1000


def parse_history(text: str) -> tuple[ChatMessage, ...]:
    """The messages of a JSON array of {role, content}; none for "". Raises SluiceError INVALID (param "history")."""
    if not text:
        return ()
    messages = decode_messages(text, PARAMETER)
    if len(messages) > _MAX_MESSAGES:
        raise _wrong(f"at most {_MAX_MESSAGES} messages, got {len(messages)}")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise _wrong(f"messages of the roles {', '.join(ROLES)}, got {message.role[:40]!r} at index {index}")
    return messages


def system_of(messages: Sequence[ChatMessage]) -> str:
    """What the conversation's own system messages say, "" where it has none."""
    return "\n\n".join(message.content for message in messages if ROLES[message.role] == "system")


def exchanges_of(messages: Sequence[ChatMessage]) -> list[tuple[ChatMessage, ...]]:
    """The other messages in order, each question with the answers to it: what is left out together.

    Answers before the first question are nobody's and left out.
    """
    exchanges: list[list[ChatMessage]] = []
    for message in messages:
        if message.role == "user":
            exchanges.append([message])
        elif message.role == "assistant" and exchanges:
            exchanges[-1].append(message)
    return [tuple(exchange) for exchange in exchanges]


def _wrong(expected: str) -> SluiceError:
    return invalid(PARAMETER, f"parameter '{PARAMETER}' must be {expected}")
