"""Text that goes straight to a sink, and what goes to the iterator all the same."""

import asyncio
from contextlib import aclosing

import pytest

from sluice.engine.types import EventDetail, FinishReason
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.relay import RelayedEvents, Sink
from sluice.pipelines.text.sampling import SamplingDefaults
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import SamplingOverrides, TextEvent, TextRequest
from tests.pipelines.llm.test_text import ScriptedEngine

WORDS = [[70], [80, 81], [90], [100], [110]]


class Reader:
    """Reads an answer from its iterator and as a sink, and keeps what comes by each way."""

    def __init__(self, model: LlmText, **fields: object) -> None:
        sent = TextRequest(request_id="r", prompt=[1, 2], sampling=SamplingOverrides(max_tokens=20), **fields)  # type: ignore[arg-type]
        events = model.generate(sent)
        assert isinstance(events, RelayedEvents)
        self.events = events
        self.relayed: list[TextEvent] = []
        self.iterated: list[TextEvent] = []
        self.is_open = True
        self.error: Exception | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with aclosing(self.events) as events:
            async for event in events:
                if not self.iterated:
                    self.events.divert(Sink(self.receive, lambda: self.is_open))
                self.iterated.append(event)

    def receive(self, event: TextEvent) -> None:
        if self.error is not None:
            raise self.error
        self.relayed.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in (*self.iterated[:1], *self.relayed, *self.iterated[1:]))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def model(engine: ScriptedEngine, rill: Tokenizer) -> LlmText:
    return LlmText("rill", rill, engine, SamplingDefaults(), created=1)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def begin(engine: ScriptedEngine, reader: Reader) -> None:
    await engine.submitted.wait()
    engine.say(WORDS[0], detail=EventDetail(0))
    await turns()
    assert len(reader.iterated) == 1


async def test_plain_text_goes_to_the_sink_and_the_end_to_the_iterator(
    model: LlmText, engine: ScriptedEngine, rill: Tokenizer
) -> None:
    reader = Reader(model)
    await begin(engine, reader)
    for word in WORDS[1:4]:
        engine.say(word)
        await turns()
    engine.say(WORDS[4], FinishReason.LENGTH)
    await reader.task
    assert [event.num_tokens for event in reader.relayed] == [2, 1, 1]
    assert [event.finish_reason for event in reader.iterated] == [None, FinishReason.LENGTH]
    assert reader.iterated[-1].completion_tokens == 6
    detokenizer = rill.detokenizer()
    assert reader.text == detokenizer.feed([token for word in WORDS for token in word]) + detokenizer.flush()


async def test_frames_of_one_turn_are_one_event(model: LlmText, engine: ScriptedEngine) -> None:
    reader = Reader(model)
    await begin(engine, reader)
    for word in WORDS[1:4]:
        engine.say(word)
    await turns()
    assert [event.num_tokens for event in reader.relayed] == [4]
    engine.say(WORDS[4])
    engine.say(WORDS[4], FinishReason.LENGTH)
    await reader.task
    assert [event.num_tokens for event in reader.iterated] == [1, 2]


async def test_what_a_closed_sink_cannot_take_goes_to_the_iterator(model: LlmText, engine: ScriptedEngine) -> None:
    reader = Reader(model)
    await begin(engine, reader)
    reader.is_open = False
    engine.say(WORDS[1])
    await turns()
    reader.is_open = True
    engine.say(WORDS[2])
    await turns()
    assert [event.num_tokens for event in reader.iterated] == [1, 2]
    assert [event.num_tokens for event in reader.relayed] == [1]
    reader.task.cancel()
    await asyncio.wait((reader.task,))


async def test_details_go_to_the_iterator(model: LlmText, engine: ScriptedEngine) -> None:
    reader = Reader(model)
    await begin(engine, reader)
    engine.say(WORDS[1], detail=EventDetail(3))
    await turns()
    assert [event.num_tokens for event in reader.iterated] == [1, 2]
    reader.task.cancel()
    await asyncio.wait((reader.task,))


async def test_what_a_sink_raises_ends_its_stream_alone(model: LlmText, engine: ScriptedEngine) -> None:
    reader = Reader(model)
    await begin(engine, reader)
    reader.error = ZeroDivisionError("a bug")
    engine.say(WORDS[1])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await reader.task
    assert model.is_idle


async def test_text_that_may_end_at_a_stop_string_goes_to_the_iterator(model: LlmText, engine: ScriptedEngine) -> None:
    reader = Reader(model, stop=("never",))
    await begin(engine, reader)
    engine.say(WORDS[1])
    await turns()
    engine.say(WORDS[4], FinishReason.LENGTH)
    await reader.task
    assert not reader.relayed


async def test_nothing_comes_after_the_reader_has_closed(model: LlmText, engine: ScriptedEngine) -> None:
    reader = Reader(model)
    await begin(engine, reader)
    engine.say(WORDS[1])  # it is to be passed on at the end of this turn
    reader.task.cancel()
    await asyncio.wait((reader.task,))
    await turns()
    assert not reader.relayed
