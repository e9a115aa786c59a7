"""`POST /v1/chat/completions`: its prompt and the shape of its answers."""

from engine.errors import invalid
from gateway.http.frames import event_frame
from gateway.http.openai.job import Job
from gateway.http.openai.reply import Choice, JsonObject, Reply, ending
from gateway.http.openai.schemas import ChatCompletionRequest
from pipelines.text.types import ChatMessage, TextEvent


def chat_job(request: ChatCompletionRequest) -> Job:
    """One answer to the conversation. Raises INVALID for limits that contradict each other."""
    conversation = tuple(ChatMessage(role=message.role, content=message.text()) for message in request.messages)
    return Job(request, [conversation], _max_tokens(request), ChatReply)


def _max_tokens(request: ChatCompletionRequest) -> int | None:
    """The newer field or the older one; None leaves the answer all that the context has."""
    old, new = request.max_tokens, request.max_completion_tokens
    if None not in (old, new) and old != new:
        raise invalid(
            "max_completion_tokens",
            f"max_completion_tokens ({new}) and max_tokens ({old}) are the same limit under a new and an old name; "
            "send one of them",
        )
    return old if new is None else new


class ChatReply(Reply):
    """Answers with messages."""

    protocol = "openai_chat"
    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return event_frame(self.chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}))

    def piece(self, index: int, text: str) -> JsonObject:
        return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def last_piece(self, index: int, end: TextEvent) -> JsonObject:
        return {"index": index, "delta": {}, "logprobs": None, **ending(end)}

    def choice(self, index: int, choice: Choice) -> JsonObject:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, **ending(choice.end)}
