"""What comes over the socket between an engine and its clients: damaged frames, and good ones with hostile values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.frames import (
    AskProbe,
    AskView,
    Attach,
    Cancel,
    Command,
    Drain,
    EngineView,
    FetchBlocks,
    LoadAdapter,
    Profile,
    Report,
    Shutdown,
    Sleep,
    StepFrame,
    Submit,
    UnloadAdapter,
    WakeUp,
)
from sluice.engine.process.transport import Transport
from sluice.engine.statistics import EngineStats
from sluice.engine.types import GenerateRequest, SamplingParams
from tests.engine.fake_runner import echo
from tests.engine.scripted_executor import ScriptedExecutor
from tests.fuzz.damage import damaged
from tests.fuzz.running import fuzzed

STATS = EngineStats(1, 2, 3, 4, 5, 6, 7.0, 8.0, 9, 10)
VIEW = EngineView(0, [], 0, [], {})
VICTIM, VICTIM_PROMPT = 0, [1, 2, 3]
PATIENCE_MS = 20_000

integers = st.sampled_from((0, 1, 2, -1, 5, 4096, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64 - 1))
floats = st.sampled_from((0.0, -0.0, 1.0, 0.5, -1.0, 1e-300, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")))
texts = st.sampled_from(("", "a", "tiny", "\0", "💥", "x" * 300, "../../etc", "tcp://127.0.0.1:1"))
good_ids = st.lists(st.integers(0, 5), min_size=1, max_size=30)
token_ids = st.one_of(good_ids, good_ids, st.lists(integers, max_size=3))
sampling_fields = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "beam_width"), st.integers(-1, 9) | integers),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), floats),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), floats),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "seed"), st.none() | integers),
    "stop_token_ids": st.lists(integers, max_size=3).map(tuple),
    "allowed_token_ids": st.lists(integers, max_size=3).map(tuple),
    "bad_words": st.lists(st.lists(integers, max_size=2).map(tuple), max_size=2).map(tuple),
    "logit_bias": st.dictionaries(integers, floats, max_size=2),
    **dict.fromkeys(("length_penalty", "top_p_min", "top_p_decay"), st.none() | floats),
    **dict.fromkeys(("no_repeat_ngram_size", "early_stopping", "top_p_reset_ids"), st.none() | integers),
}
request_fields = {
    "priority": integers,
    **dict.fromkeys(("tenant", "cache_salt", "session", "adapter"), texts),
    **dict.fromkeys(("weight", "timeout_s", "queue_timeout_s"), st.none() | floats),
    **dict.fromkeys(("resume_token_ids", "predicted_token_ids"), token_ids),
    **dict.fromkeys(("returns_metrics", "returns_timing", "returns_context_logits", "fits_context"), st.booleans()),
    "second_text_start": integers,
    "images": st.lists(st.binary(max_size=4), max_size=2),
}


def some_of(fields: dict[str, Any]) -> "st.SearchStrategy[dict[str, Any]]":
    """Values of a few of the fields."""
    names = st.sets(st.sampled_from(sorted(fields)), max_size=2)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in sorted(chosen)}))


def make_submit(number: int, prompt: list[int], sampling: dict[str, Any], fields: dict[str, Any], most: Any) -> Submit:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
    request = GenerateRequest(request_id="r", prompt_token_ids=prompt, sampling=params, **fields)
    return Submit(number, request, most_wait_s=most)


numbers = st.integers(1, 9)
submits = st.builds(
    make_submit, numbers, token_ids, some_of(sampling_fields), some_of(request_fields), st.none() | floats
)
others = st.one_of(
    st.builds(Cancel, numbers),
    st.builds(LoadAdapter, texts, texts),
    st.builds(UnloadAdapter, texts),
    st.builds(Profile, floats),
    st.builds(FetchBlocks, integers, texts, st.binary(max_size=40)),
    st.builds(Sleep, integers, st.sampled_from(("abort", "wait", "keep"))),
    st.builds(WakeUp, st.none() | st.lists(texts, max_size=2)),
)
commands = st.one_of(submits, submits, others)
over_wire = msgspec.msgpack.Decoder(Command)


@fuzzed(40)
@given(st.lists(commands, min_size=1, max_size=6))
def test_no_command_harms_the_executor_or_another_stream(hostile: list[Command]) -> None:
    bench = ScriptedExecutor()
    bench.submit(VICTIM, VICTIM_PROMPT, max_tokens=8)
    seen: set[int] = set()
    for command in hostile:
        if isinstance(command, Submit):
            if command.stream_id in seen:
                continue  # the transport lets no number come twice
            seen.add(command.stream_id)
        bench.script.pending.append(over_wire.decode(msgspec.msgpack.encode(command)))
        bench.step()
    bench.now += 1.0
    for stream_id in sorted(seen):
        bench.script.pending.append(Cancel(stream_id))
    bench.finish()
    assert bench.tokens[VICTIM] == echo(VICTIM_PROMPT, 8)
    ended = {each.stream_id for each in bench.failures} | {number for number in seen if bench.reasons[number]}
    assert ended == seen, "each request ends"


class Sockets:
    """A transport, its launcher, and a client that does harm."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/engine"
        self.transport = Transport(self.endpoint)
        self.transport.offer_view(lambda question: VIEW)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.launcher, self.other = self.context.socket(zmq.DEALER), self.context.socket(zmq.DEALER)
        for socket in (self.launcher, self.other):
            socket.rcvtimeo = PATIENCE_MS
            socket.connect(self.endpoint)
        self.launcher.send(b"")
        self.transport.await_launcher()

    def ask(self, socket: "zmq.Socket[bytes]", command: Command) -> list[Command]:
        """Return the commands that the engine gets up to a question of `socket`, which is answered."""
        socket.send(msgspec.msgpack.encode(command))
        found: list[Command] = []
        while not socket.poll(0):
            found += self.transport.receive(0.01)
        assert msgspec.msgpack.decode(socket.recv(), type=Report) == VIEW
        return found

    def close(self) -> None:
        self.launcher.close(0)
        self.other.close(0)
        self.context.term()
        self.transport.close()


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sockets]:
    found = Sockets(tmp_path_factory.mktemp("engine"))
    yield found
    found.close()


good = st.one_of(commands, st.builds(Attach, st.booleans()), st.builds(AskProbe, integers), st.just(Drain()))
frames = st.one_of(
    good.flatmap(lambda command: damaged(msgspec.msgpack.encode(command))),
    st.binary(max_size=20),
    st.just(b"\x91" * 5000),
    st.just(b"\xdf\xff\xff\xff\xff"),
)


@fuzzed(40)
@given(st.lists(st.lists(frames, max_size=3), min_size=1, max_size=4))
def test_no_frame_harms_the_transport(sockets: Sockets, messages: list[list[bytes]]) -> None:
    for parts in messages:
        sockets.other.send_multipart(parts or [b""])
    for command in sockets.ask(sockets.launcher, AskView()):
        assert not isinstance(command, Shutdown | Drain), "only the launcher ends the engine"
    sockets.transport.emit(StepFrame([], [], STATS))
    assert isinstance(msgspec.msgpack.decode(sockets.launcher.recv(), type=Report), StepFrame)
