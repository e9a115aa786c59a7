"""The time that finding tool calls and reasoning adds to a token, for each format, in this process without a server."""

import time
from collections.abc import Callable, Sequence

from benchmarks.figures import Figure, ReportProgress, Target
from sluice.gateway.api.openai.chat import ChatReply, PartsReply
from sluice.gateway.api.openai.reply import OpenAIReply, ReplyOptions
from sluice.pipelines.chat.formats import parse_tools
from sluice.pipelines.chat.registry import ChatFormats, find_formats
from sluice.pipelines.text.types import TextEvent
from tests.pipelines.chat.samples import CANONICAL, TOOLS

CHARS_A_TOKEN = 4
TARGET = Target(5.0)
ROUNDS = 5
"""Each sample is the least of so many: the work is always the same, and other processes only add to it."""
PROSE = "Plain answer text with some words, and more. " * 1000
ARGUMENT = " lorem ipsum é" * 4000
"""Put into the first string argument of a format's sample, so that most of its tokens are arguments of a call."""
THOUGHT = "One step follows from the other, and more. " * 1000
HARMONY = "openai"
_OPTIONS = ReplyOptions(num_prompts=1)


def measure(num_repeats: int, report: ReportProgress) -> list[Figure]:
    """Measure what formatting the tokens of an answer takes longer with a reader than without one."""
    figures = []
    for tools, texts in _answers().items():
        formats = find_formats("", tools, "openai_gptoss" if tools == HARMONY else "think")
        for kind, text in texts.items():
            samples = tuple(_added_us(formats, text) for _ in range(num_repeats))
            figures.append(Figure(f"parsing adds, {kind}", tools, "us/token", samples, TARGET))
            report(f"{tools}, {kind}: " + " ".join(f"{sample:.2f}" for sample in samples))
    return figures


def _answers() -> dict[str, dict[str, str]]:
    """Return long answers of each format: of text alone, of reasoning, and of a call with a long argument."""
    found: dict[str, dict[str, str]] = {}
    for sample in CANONICAL:
        is_harmony = sample.tools == HARMONY
        found[sample.tools] = {
            "text": f"<|channel|>final<|message|>{PROSE}" if is_harmony else PROSE,
            "reasoning": f"<|channel|>analysis<|message|>{THOUGHT}" if is_harmony else f"<think>{THOUGHT}",
            "arguments": sample.text.replace('"x', f'"x{ARGUMENT}', 1),
        }
    return found


def _added_us(formats: ChatFormats, text: str) -> float:
    """Return how much longer a token takes with the formats' reader, in microseconds."""
    events = [
        TextEvent(text[start : start + CHARS_A_TOKEN], 1, 8, start // CHARS_A_TOKEN)
        for start in range(0, len(text), CHARS_A_TOKEN)
    ]
    return _least_us(events, lambda: _reader_reply(formats)) - _least_us(events, _plain_reply)


def _plain_reply() -> OpenAIReply:
    return ChatReply(reply_id="chatcmpl-0", created=0, model="bench", fingerprint="fp_0", options=_OPTIONS)


def _reader_reply(formats: ChatFormats) -> OpenAIReply:
    head = {"reply_id": "chatcmpl-0", "created": 0, "model": "bench", "fingerprint": "fp_0"}
    return PartsReply(readers=[formats.reader(parse_tools(TOOLS))], options=_OPTIONS, **head)


def _least_us(events: Sequence[TextEvent], make_reply: Callable[[], OpenAIReply]) -> float:
    least_s = float("inf")
    for _ in range(ROUNDS):
        reply = make_reply()
        started = time.process_time()
        for event in events:
            reply.frame(0, event)
        least_s = min(least_s, time.process_time() - started)
    return least_s * 1e6 / len(events)
