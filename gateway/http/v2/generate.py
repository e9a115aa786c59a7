"""Triton's generate extension: one JSON object, or a stream of them as server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from engine.errors import ErrorCode, SluiceError, invalid
from engine.types import Grammar, GrammarKind
from gateway.http.errors import v2_error_body
from gateway.http.frames import HOLE, TextFrame, event_frame
from gateway.http.scheduling import Scheduling
from gateway.http.v2.parsing import GenerateInputs
from pipelines.text.types import SamplingOverrides, TextEvent, TextRequest

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.backends.llm.text import LlmText

PROTOCOL = "v2_generate"

_DEFAULTS: dict[str, Any] = {
    "max_tokens": 16,
    "min_tokens": 0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "ignore_eos": False,
}
"""TensorRT-LLM's: here a checkpoint's generation_config.json has no say."""
_SAMPLES = {"temperature", "top_k", "top_p", "min_p", "typical_p"}
"""Decoding is greedy unless one of these is given; then the temperature is 1 unless it is given."""
_GUIDES = {
    "json": GrammarKind.JSON_OBJECT,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf_grammar": GrammarKind.EBNF,
}
_MICROSECONDS = 1e-6
GUIDE, GUIDE_TYPE = "guided_decoding_guide", "guided_decoding_guide_type"


def text_request(inputs: GenerateInputs, scheduling: Scheduling, request_id: str) -> TextRequest:
    """What the model is asked; `request_id` is for the log. Raises INVALID for half a constraint."""
    values = inputs.values
    temperature = 1.0 if _SAMPLES & values.keys() else 0.0
    fields = {name: values.get(name, default) for name, default in _DEFAULTS.items()}
    sampling = SamplingOverrides(
        temperature=values.get("temperature", temperature),
        grammar=_grammar(values.get(GUIDE_TYPE, ""), values.get(GUIDE, "")),
        logprobs=0 if values.get("return_log_probs") else None,
        **fields,
    )
    timeout_s = None if inputs.timeout is None else inputs.timeout * _MICROSECONDS
    return TextRequest(
        request_id=request_id,
        prompt=values["text_input"],
        sampling=sampling,
        stop=_words(values, "stop_words"),
        bad_words=_words(values, "bad_words"),
        cache_salt=inputs.cache_salt,
        **scheduling.fields(inputs.priority, timeout_s),
    )


def _words(values: dict[str, Any], name: str) -> tuple[str, ...]:
    """Clients send "" for none: TensorRT-LLM's examples do, as some of its versions required the input."""
    return tuple(word for word in values.get(name, ()) if word)


def _grammar(kind: str, guide: str) -> Grammar | None:
    """TensorRT-LLM's two inputs, where "" is none."""
    if not kind:
        if guide:
            raise invalid(GUIDE_TYPE, f"input '{GUIDE_TYPE}' is needed with '{GUIDE}': one of {', '.join(_GUIDES)}")
        return None
    if kind not in _GUIDES:
        raise invalid(GUIDE_TYPE, f"input '{GUIDE_TYPE}' must be one of {', '.join(_GUIDES)}, got '{kind[:40]}'")
    if not guide and kind != "json":
        raise invalid(GUIDE, f"input '{GUIDE}' is needed where '{GUIDE_TYPE}' is {kind}")
    return Grammar(_GUIDES[kind], "" if kind == "json" else guide)


def refuse_stream(inputs: GenerateInputs) -> None:
    """Raise INVALID where `generate` is asked to stream."""
    if inputs.values.get("stream"):
        raise SluiceError(
            ErrorCode.INVALID,
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses",
            param="stream",
        )


def error_frame(error: SluiceError) -> bytes:
    """The event that ends a stream which failed."""
    return b"data: " + v2_error_body(error) + b"\n\n"


class GenerateReply:
    """The shapes of one request's responses. Keys are in alphabetical order, as Triton's are.

    It sees every event of its request, in order, and so collects what the last response sums up.
    """

    def __init__(self, inputs: GenerateInputs, model: "LlmText") -> None:
        self._head = {"model_name": model.name, "model_version": model.version}
        if inputs.id:
            self._head["id"] = inputs.id
        self._returns_input_count = inputs.values.get("return_num_input_tokens", False)
        self._returns_output_count = inputs.values.get("return_num_output_tokens", False)
        self._log_probs: list[float] | None = [] if inputs.values.get("return_log_probs") else None
        self._text_frame = TextFrame.around(self._response(HOLE))

    def frame(self, event: TextEvent) -> bytes:
        """One event of a stream."""
        self.note(event)
        if event.finish_reason is None:
            return self._text_frame.fill(event.text)
        return event_frame(self.last_response(event.text, event))

    def note(self, event: TextEvent) -> None:
        """Keep what the end carries of `event`."""
        if self._log_probs is not None and event.detail is not None:
            self._log_probs += [entry.logprob or 0.0 for entry in event.detail.logprobs or ()]

    def last_response(self, text: str, end: TextEvent) -> dict[str, Any]:
        """The response that completes a request."""
        outputs: dict[str, Any] = {"finish_reason": end.finish_reason}
        if self._returns_input_count:
            outputs["num_input_tokens"] = end.prompt_tokens
        if self._returns_output_count:
            outputs["num_output_tokens"] = end.completion_tokens
        if self._log_probs is not None and end.detail is not None:
            outputs["cum_log_probs"] = end.detail.total_logprob
            outputs["output_log_probs"] = self._log_probs
        return self._response(text, outputs)

    def _response(self, text: str, outputs: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(sorted({**self._head, **(outputs or {}), "text_output": text}.items()))


async def whole_response(events: AsyncGenerator[TextEvent, None], reply: GenerateReply) -> dict[str, Any]:
    """The one response of a request that does not stream."""
    pieces = []
    async with aclosing(events):
        async for event in events:
            pieces.append(event.text)
            reply.note(event)
    return reply.last_response("".join(pieces), event)


async def whole_frame(events: AsyncGenerator[TextEvent, None], reply: GenerateReply) -> AsyncGenerator[bytes, None]:
    """A stream with one event, which has all of the text."""
    yield event_frame(await whole_response(events, reply))


async def stream_frames(events: AsyncGenerator[TextEvent, None], reply: GenerateReply) -> AsyncGenerator[bytes, None]:
    """A stream with an event for each piece of text. It ends without a terminator, as Triton's does."""
    async with aclosing(events):
        async for event in events:
            yield reply.frame(event)
