"""The model over a real engine client: with the executor and a runner without a model, and with scripted events."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from sluice.engine.client.base import EngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.frames import Cancel, Command, StepFrame, Submit
from sluice.engine.statistics import EngineStats
from sluice.engine.types import (
    EngineInfo,
    EventDetail,
    FinishReason,
    Grammar,
    GrammarKind,
    RequestFailed,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
from sluice.pipelines.text.sampling import SamplingDefaults, tokenize_bad_words
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    EncodedPrompt,
    Prompt,
    SamplingOverrides,
    TextEvent,
    TextRequest,
)
from tests.engine.fake_runner import EchoRunner
from tests.engine.in_process_client import InProcessEngineClient
from tests.pulled import collected, pulled

INFO = EngineInfo(
    runtime="scripted",
    model_type="none",
    dtype="f32",
    vocab_size=4096,
    eos_token_ids=(5,),
    max_model_len=100,
    block_size=8,
    num_blocks=10,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    load_seconds=0.0,
)
STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)
CHAT = Conversation((ChatMessage("user", "hi"),))


class ScriptedEngine(EngineClient):
    """Answers as the test says, and keeps the requests it got."""

    def __init__(self, info: EngineInfo = INFO) -> None:
        super().__init__(EngineConfig(model_path=""))
        self._info = info
        self.commands: list[Command] = []
        self.submitted = asyncio.Event()

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    def _send(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, Submit):
            self.submitted.set()

    @property
    def submit_command(self) -> Submit:
        (submit,) = [command for command in self.commands if isinstance(command, Submit)]
        return submit

    @property
    def sampling(self) -> SamplingParams:
        return self.submit_command.request.sampling

    def say(self, token_ids: list[int], reason: FinishReason | None = None, detail: EventDetail | None = None) -> None:
        event = TokenEvent(self.submit_command.stream_id, token_ids, reason, detail)
        self._on_frame(StepFrame([event], [], STATS))

    def fail(self, code: ErrorCode, message: str) -> None:
        self._on_frame(StepFrame([], [RequestFailed(self.submit_command.stream_id, code, message)], STATS))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def model(engine: ScriptedEngine, rill: Tokenizer) -> LlmText:
    return LlmText("rill", rill, engine, SamplingDefaults(temperature=0.5), created=1)


def request(prompt: Prompt, stop: tuple[str, ...] = (), **sampling: object) -> TextRequest:
    return TextRequest(request_id="r", prompt=prompt, sampling=sampling, stop=stop)


async def collect(model: LlmText, sent: TextRequest) -> list[TextEvent]:
    return await collected(model.generate, sent)


async def refusal(model: LlmText, sent: TextRequest) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await collect(model, sent)
    return caught.value


async def submit(model: LlmText, engine: ScriptedEngine, sent: TextRequest) -> None:
    """Bring a request to the engine and let it end there."""
    task = asyncio.create_task(collect(model, sent))
    await engine.submitted.wait()
    engine.say([70], FinishReason.LENGTH)
    await task


async def test_what_is_not_sent_comes_from_the_model(model: LlmText, engine: ScriptedEngine) -> None:
    await submit(model, engine, request([1, 2, 3], top_k=7))
    # The client of the engine adds a seed, so that it could go on after a crash.
    sampling = msgspec.structs.replace(engine.sampling, seed=None)
    assert sampling == SamplingParams(temperature=0.5, top_k=7, max_tokens=78)


@pytest.mark.parametrize(("max_model_len", "num_blocks", "most"), [(100, 10, 78), (100, 50, 97), (60, 10, 57)])
async def test_max_tokens_is_what_context_and_cache_leave(
    rill: Tokenizer, max_model_len: int, num_blocks: int, most: int
) -> None:
    info = msgspec.structs.replace(INFO, max_model_len=max_model_len, num_blocks=num_blocks)
    engine = ScriptedEngine(info)
    model = LlmText("rill", rill, engine, SamplingDefaults(), created=1)
    await submit(model, engine, request([1, 2, 3]))
    assert engine.sampling.max_tokens == most
    with pytest.raises(SluiceError):
        await collect(model, request([1, 2, 3], max_tokens=most + 1))


async def test_the_tokenizers_end_of_sequence_ends_too(rill: Tokenizer) -> None:
    assert rill.eos_token_id == 5
    for eos_token_ids, ignore_eos, expected in [((5,), False, ()), ((9,), False, (5,)), ((9,), True, ())]:
        engine = ScriptedEngine(msgspec.structs.replace(INFO, eos_token_ids=eos_token_ids))
        model = LlmText("rill", rill, engine, SamplingDefaults(), created=1)
        await submit(model, engine, request([1], ignore_eos=ignore_eos))
        assert engine.sampling.stop_token_ids == expected


async def test_priority_tenant_salt_timeouts_and_sampling_reach_the_engine(
    model: LlmText, engine: ScriptedEngine
) -> None:
    sent = TextRequest(
        request_id="r",
        prompt=[1],
        sampling=SamplingOverrides(grammar=Grammar(GrammarKind.REGEX, "a+"), logit_bias={5: 2.0}),
        bad_words=("cat",),
        priority=-3,
        tenant="ada",
        cache_salt="salt",
        timeout_s=2.5,
        queue_timeout_s=1.5,
    )
    await submit(model, engine, sent)
    received = engine.submit_command.request
    assert (received.priority, received.tenant, received.cache_salt) == (-3, "ada", "salt")
    assert (received.timeout_s, received.queue_timeout_s) == (2.5, 1.5)
    assert (received.sampling.grammar, received.sampling.logit_bias) == (Grammar(GrammarKind.REGEX, "a+"), {5: 2.0})
    assert received.sampling.bad_words == tokenize_bad_words(model.tokenizer, ("cat",))


async def test_an_encoded_prompt_is_not_encoded_again(model: LlmText, engine: ScriptedEngine) -> None:
    await submit(model, engine, request(EncodedPrompt(CHAT, [7, 8])))
    assert engine.submit_command.request.prompt_token_ids == [7, 8]


async def test_errors_of_an_encoded_conversation_name_the_messages(model: LlmText) -> None:
    assert (await refusal(model, request(EncodedPrompt(CHAT, [7] * 200)))).param == "messages"


@pytest.mark.parametrize("prompt", ["hi, you", [70, 71, 72]])
async def test_echo_puts_the_prompt_first_with_its_log_probabilities(
    model: LlmText, engine: ScriptedEngine, prompt: Prompt
) -> None:
    sampling = SamplingOverrides(logprobs=0, prompt_logprobs=0)
    sent = TextRequest(request_id="r", prompt=prompt, sampling=sampling, echo=True)
    task = asyncio.create_task(collect(model, sent))
    await engine.submitted.wait()
    ids = engine.submit_command.request.prompt_token_ids
    of_prompt = [None, *(TokenLogprob(token_id, -1.0) for token_id in ids[1:])]
    engine.say([80], detail=EventDetail(0, [TokenLogprob(80, -2.0)], of_prompt))
    await asyncio.sleep(0)
    engine.say([81], FinishReason.LENGTH, EventDetail(logprobs=[TokenLogprob(81, -3.0)]))
    events = await task
    text = "".join(event.text for event in events)
    entries = [entry for event in events if event.detail for entry in event.detail.logprobs or ()]
    assert text == (prompt if isinstance(prompt, str) else "abc") + "kl"
    assert [entry.token.token_id for entry in entries] == [*ids, 80, 81]
    assert [entry.logprob for entry in entries] == [None, *[-1.0] * (len(ids) - 1), -2.0, -3.0]
    assert all(text[entry.start :].startswith(entry.token.text) for entry in entries)


@pytest.mark.parametrize("stop_token_ids", [(), (70,)])
async def test_the_stop_reason_is_a_token_only_where_the_request_named_it(
    model: LlmText, engine: ScriptedEngine, stop_token_ids: tuple[int, ...]
) -> None:
    task = asyncio.create_task(collect(model, request([1], stop_token_ids=stop_token_ids)))
    await engine.submitted.wait()
    engine.say([71, 70], FinishReason.STOP)
    (event,) = await task
    assert event == TextEvent("b", 2, 1, 2, FinishReason.STOP, 70 if stop_token_ids else None)


async def test_a_stop_string_cancels_before_its_event_is_read(
    model: LlmText, engine: ScriptedEngine, rill: Tokenizer
) -> None:
    events = pulled(model.generate, request([1], stop=("c",)))
    first = asyncio.ensure_future(anext(events))
    await engine.submitted.wait()
    engine.say(await rill.encode_text("abcde"))
    event = await first
    assert (event.text, event.finish_reason, event.stop_reason) == ("ab", FinishReason.STOP, "c")
    assert engine.commands[1:] == [Cancel(engine.submit_command.stream_id)]
    assert [event async for event in events] == []
    assert len(engine.commands) == 2


async def test_closing_cancels(model: LlmText, engine: ScriptedEngine) -> None:
    async with aclosing(pulled(model.generate, request([1]))) as events:
        first = asyncio.ensure_future(anext(events))
        await engine.submitted.wait()
        engine.say([70])
        assert (await first).text == "a"
        assert len(engine.commands) == 1
    assert engine.commands[1:] == [Cancel(engine.submit_command.stream_id)]


async def test_a_reader_that_is_cancelled_while_waiting_cancels(model: LlmText, engine: ScriptedEngine) -> None:
    task = asyncio.create_task(collect(model, request([1])))
    await engine.submitted.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.commands[1:] == [Cancel(engine.submit_command.stream_id)]


async def test_a_failure_under_way_comes_after_the_text_before_it(model: LlmText, engine: ScriptedEngine) -> None:
    events = pulled(model.generate, request([1]))
    first = asyncio.ensure_future(anext(events))
    await engine.submitted.wait()
    engine.say([70])
    engine.fail(ErrorCode.INTERNAL, "the runner failed")
    assert (await first).text == "a"
    with pytest.raises(SluiceError, match="the runner failed"):
        await anext(events)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "words"),
    [
        ("", {}, "prompt", "at least 1 token"),
        ("word " * 200, {}, "prompt", "context is 100 tokens"),
        ([1, 5000], {}, "prompt", "between 0 and 4095, got 5000"),
        (Conversation(()), {}, "messages", "empty"),
        (Conversation((ChatMessage("user", "word " * 200),)), {}, "messages", "context is 100 tokens"),
        ([1, 2], {"max_tokens": 99}, "max_tokens", "at most 98"),
    ],
)
async def test_bad_requests_are_refused_at_the_first_event(
    model: LlmText, engine: ScriptedEngine, prompt: Prompt, sampling: dict[str, object], param: str, words: str
) -> None:
    error = await refusal(model, request(prompt, (), **sampling))
    assert (error.code, error.param) == (ErrorCode.INVALID, param)
    assert words in error.message
    assert engine.commands == []


async def test_an_engine_that_is_still_loading_is_unavailable(rill: Tokenizer) -> None:
    engine = InProcessEngineClient(EngineConfig(model_path=""), EchoRunner())
    model = LlmText("rill", rill, engine, SamplingDefaults(), created=1)
    assert (await refusal(model, request([1]))).code is ErrorCode.UNAVAILABLE


def test_a_checkpoint_is_loaded_before_its_engine_has_started(rill_path: Path) -> None:
    engine = InProcessEngineClient(EngineConfig(model_path=str(rill_path)), EchoRunner())
    model = load_text(LlmText, "rill", rill_path, engine)
    assert (model.name, model.version, model.defaults) == ("rill", "1", SamplingDefaults())
    assert model.created == int((rill_path / "config.json").stat().st_mtime)
    with pytest.raises(SluiceError, match="loading"):
        _ = model.info
