"""Compaction: a summary that the model writes, in place of what was said and done so far.

The messages of users and instructions stay as they are. The item of a compaction has the summary as its
`encrypted_content`, and what precedes it in later requests is read as those messages alone.
"""

from collections.abc import Sequence

import orjson
from fastapi import Request

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.openai.responses.history import is_kept, is_summary
from sluice.gateway.api.openai.responses.items import ItemIds, JsonObject, seal_text
from sluice.gateway.api.openai.responses.prompt import ResponsePrompt, make_prompt
from sluice.gateway.api.openai.responses.reply import ResponseReply
from sluice.gateway.api.openai.responses.schemas import CreateResponseRequest
from sluice.gateway.front.http.request import get_request_id, parse_scheduling, run_while_connected
from sluice.gateway.options.http import RequestOptions
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.text.model import IMAGE_PLACEHOLDER, TextModel
from sluice.pipelines.text.stream import Called
from sluice.pipelines.text.types import (
    AnswerText,
    ChatReader,
    Conversation,
    EncodedPrompt,
    PromptForm,
    SamplingOverrides,
    TextEvent,
    TextRequest,
)

_MAX_TOKENS = 2048
"""Most tokens of a summary, unless the request says otherwise. A short context bounds it to a quarter, too."""
_TASK = (
    "Write a summary of this conversation for an assistant that goes on with it and sees, besides the summary, only "
    "the user's messages. Say what was asked, found out and decided, which files and commands matter, what was "
    "changed, what the last results were, and what remains to be done. Write the summary alone."
)


def is_trigger(items: Sequence[JsonObject]) -> bool:
    """Whether a request asks for a compaction of its items."""
    return bool(items) and items[-1]["type"] == "compaction_trigger"


def compact_threshold(fields: CreateResponseRequest) -> int | None:
    """Return the number of tokens from which a prompt is compacted; None for any."""
    found = [each.compact_threshold for each in fields.context_management or () if each.compact_threshold is not None]
    return min(found, default=None)


def has_more_than_messages(items: Sequence[JsonObject]) -> bool:
    """Whether a compaction would leave out any of the items."""
    summaries = [place for place, item in enumerate(items) if is_summary(item)]
    return any(not is_kept(item) for item in items[(summaries or [-1])[-1] + 1 :])


async def is_longer(prompt: ResponsePrompt, model: TextModel, threshold: int, form: PromptForm) -> bool:
    """Whether a prompt has more than `threshold` tokens, or more than the model takes. That of a pipeline, which nobody
    counts, has not."""
    sent = model.adapt(prompt.prompt) if isinstance(prompt.prompt, Conversation) else prompt.prompt
    try:
        encoded = await model.prepare_shared(sent, form)
    except SluiceError as error:
        if error.code is ErrorCode.INVALID:
            return True
        raise
    return isinstance(encoded, EncodedPrompt) and len(encoded.token_ids) > threshold


def summary_fields(fields: CreateResponseRequest, model: TextModel) -> CreateResponseRequest:
    """Return the fields of the request for a summary: of text, without calls, and not longer than it should be."""
    context = model.max_model_len or 4 * _MAX_TOKENS
    most = fields.max_output_tokens or max(1, min(_MAX_TOKENS, context // 4))
    changes = {"max_output_tokens": most, "truncation": "auto", "tool_choice": "none", "response_format": None}
    return fields.model_copy(update=changes)


async def summary_prompt(
    fields: CreateResponseRequest, items: Sequence[JsonObject], model: TextModel
) -> ResponsePrompt:
    """Return the prompt for a summary of items, without images, and without the oldest where they are too many for the
    model."""
    task = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _TASK}], "id": ""}
    return await make_prompt(fields, [*map(_in_text, items), task], model, fields.max_output_tokens or 1)


def _in_text(item: JsonObject) -> JsonObject:
    """Return an item whose images are named. A summary is made of texts."""
    if item["type"] != "message":
        return item
    named = {"type": "input_text", "text": IMAGE_PLACEHOLDER}
    return {**item, "content": [named if part["type"] == "input_image" else part for part in item["content"]]}


def compaction_item(ids: ItemIds, summary: str) -> JsonObject:
    return {"id": ids.make("cmp"), "type": "compaction", "encrypted_content": seal_text("compaction", summary)}


class Summarizer:
    """Has a model write a summary before a response is generated, for as long as the client is connected."""

    def __init__(
        self,
        plane: Plane,
        defaults: RequestOptions,
        request: Request,
        *,
        protocol: str,
        priority: int | None,
        session: str,
    ) -> None:
        """`priority` and `session` are the body's."""
        self._plane = plane
        self._defaults = defaults
        self._request = request
        self._protocol = protocol
        self._priority = priority
        self._session = session

    async def summarize(self, fields: CreateResponseRequest, items: Sequence[JsonObject], model: TextModel) -> str:
        """Return the summary. Raises as `Plane.generate`."""
        asked = summary_fields(fields, model)
        prompt = await summary_prompt(asked, items, model)
        scheduling = parse_scheduling(self._request.headers, self._defaults)
        request = TextRequest(
            request_id=f"{get_request_id(self._request)}-compaction",
            prompt=prompt.prompt,
            protocol=self._protocol,
            sampling=SamplingOverrides(max_tokens=asked.max_output_tokens),
            cache_salt=fields.cache_salt or "",
            **scheduling.fields(self._priority, session=self._session),
        )
        summary = _SummaryText(model.chat_reader(request))
        generate = self._plane.generate(model, request)
        await run_while_connected(self._request.receive, generate(Called(summary.add)))
        return summary.text.strip()


class _SummaryText:
    """Collects the text of an answer, without its reasoning and calls."""

    def __init__(self, reader: ChatReader | None) -> None:
        self._reader = reader
        self.text = ""

    def add(self, event: TextEvent) -> None:
        parts = [AnswerText(event.text)] if self._reader is None else self._reader.read(event)
        self.text += "".join(part.text for part in parts if isinstance(part, AnswerText))


class CompactedReply(ResponseReply):
    """Formats a compaction with what it leaves of its input, as the input of the next request."""

    async def whole(self) -> bytes:
        self.finish()
        response = self.response
        if response["status"] == "failed":
            raise SluiceError(ErrorCode.UNAVAILABLE, response["error"]["message"])
        kept = [item for item in self.record.items.all if is_kept(item)]
        output = [*kept, *(item for item in response["output"] if item["type"] == "compaction")]
        head = {"id": self.record.response_id, "object": "response.compaction", "created_at": response["created_at"]}
        return orjson.dumps({**head, "output": output, "usage": response["usage"]})
