"""The conversation of a request, whose requests go to one rank."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ConversationParams:
    conversation_id: str
