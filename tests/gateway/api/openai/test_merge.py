"""Answers of several texts: their events side by side, and their ends together."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing

import orjson
import pytest

from sluice.engine.client.stream import Consumer
from sluice.engine.types import FinishReason
from sluice.gateway.api.openai.completions import CompletionReply
from sluice.gateway.api.openai.reply import ReplyOptions
from sluice.gateway.api.openai.routes import _STARTS_PER_TURN, stream_frames, whole_choices
from sluice.gateway.front.http.sse import DONE
from sluice.pipelines.text.consumers import Generate, give
from sluice.pipelines.text.types import TextEvent
from tests.pulled import collected, pulled


def event(text: str, reason: FinishReason | None = None) -> TextEvent:
    return TextEvent(text, 1, 1, 1, reason)


END = event("", FinishReason.STOP)


class Source:
    """Generates the events that the test puts in. It records that it ended."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[TextEvent | Exception] = asyncio.Queue()
        self.is_closed = False

    async def generate(self, consumer: Consumer[TextEvent]) -> None:
        try:
            while (item := await self.items.get()) is not END:
                if isinstance(item, Exception):
                    raise item
                await give(consumer, item)
            await give(consumer, END)
        finally:
            self.is_closed = True


def arguments(texts: Sequence[Generate]) -> tuple[Sequence[Generate], CompletionReply, ReplyOptions]:
    options = ReplyOptions(len(texts))
    return texts, CompletionReply(reply_id="r", created=1, model="m", fingerprint="f", options=options), options


@pytest.mark.parametrize("num_texts", [1, 3])
async def test_each_text_has_all_its_events_in_order(num_texts: int) -> None:
    sources = [Source() for _ in range(num_texts)]
    for index, source in enumerate(sources):
        for item in (event(f"{index}a"), event(f"{index}b"), END):
            source.items.put_nowait(item)
    *frames, last = await collected(stream_frames, *arguments([source.generate for source in sources]))
    choices = [orjson.loads(frame.removeprefix(b"data: "))["choices"][0] for frame in frames]
    for number in range(num_texts):
        assert [each["text"] for each in choices if each["index"] == number] == [f"{number}a", f"{number}b", ""]
    assert (len(choices), last) == (3 * num_texts, DONE)


@pytest.mark.parametrize("num_texts", [1, 3])
async def test_the_first_failure_ends_all(num_texts: int) -> None:
    sources = [Source() for _ in range(num_texts)]
    sources[0].items.put_nowait(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await collected(stream_frames, *arguments([source.generate for source in sources]))
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num_texts", [1, 3])
async def test_closing_closes_all(num_texts: int) -> None:
    sources = [Source() for _ in range(num_texts)]
    for source in sources:
        source.items.put_nowait(event("a"))
    async with aclosing(pulled(stream_frames, *arguments([source.generate for source in sources]))) as frames:
        await anext(frames)
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_many_texts_of_a_request_start_over_several_turns_of_the_loop(is_streamed: bool) -> None:
    turns, started = 0, list[int]()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def generate(consumer: Consumer[TextEvent]) -> None:
        started.append(turns)
        await give(consumer, END)

    counting = asyncio.create_task(count_turns())
    texts, reply, options = arguments([generate] * 512)
    if is_streamed:
        await collected(stream_frames, texts, reply, options)
    else:
        await whole_choices(texts, options)
    counting.cancel()
    assert max(Counter(started).values()) <= 2 * _STARTS_PER_TURN


async def test_tokens_that_complete_no_text_have_an_empty_piece_as_with_vllm() -> None:
    source = Source()
    for item in (event(""), event("a"), event(""), END):
        source.items.put_nowait(item)
    *frames, _ = await collected(stream_frames, *arguments([source.generate]))
    choices = [orjson.loads(frame.removeprefix(b"data: "))["choices"][0] for frame in frames]
    assert [(each["text"], each["finish_reason"]) for each in choices] == [
        ("", None),
        ("a", None),
        ("", None),
        ("", "stop"),
    ]
