"""The engine's socket: what a frame has reaches its clients, each its part."""

from pathlib import Path

import msgspec
import pytest
import zmq

from sluice.engine.frames import (
    AdapterOutcome,
    AskView,
    Attach,
    BlockMap,
    EngineView,
    Report,
    SleepOutcome,
    StepFrame,
    StepRecord,
)
from sluice.engine.process.curve import make_certificates, read_pair, read_public
from sluice.engine.process.transport import MAX_READ, Transport
from sluice.engine.statistics import EngineStats
from sluice.errors import SluiceError


def test_a_flood_is_read_in_parts(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    transport, context = Transport(endpoint), zmq.Context()
    launcher, noisy = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    try:
        launcher.connect(endpoint)
        launcher.send(b"")
        transport.await_launcher()
        noisy.connect(endpoint)
        for _ in range(3 * MAX_READ):
            noisy.send(msgspec.msgpack.encode(Attach()))
        num_parts = 0
        while num_parts < 2:
            transport.receive(1.0)
            num_parts += transport.has_more
        while transport.has_more:
            transport.receive(0.0)
    finally:
        for client in (launcher, noisy):
            client.close(0)
        context.term()
        transport.close()


def test_a_client_gets_everything_of_a_frame(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    transport, context = Transport(endpoint), zmq.Context()
    client = context.socket(zmq.DEALER)
    try:
        client.connect(endpoint)
        client.send(b"")
        transport.await_launcher()
        stats = EngineStats(1, 2, 3, 4, 5, 6, 7.0, 8.0, 9, 10)
        frame = StepFrame([], [], stats, [AdapterOutcome("a", adapters=("a",))], [SleepOutcome(is_sleeping=True)])
        transport.emit(frame)
        assert msgspec.msgpack.decode(client.recv(), type=Report) == frame
    finally:
        client.close(0)
        context.term()
        transport.close()


def test_who_asks_for_a_view_gets_one(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    transport = Transport(endpoint)
    questions: list[AskView] = []

    def view(question: AskView) -> EngineView:
        questions.append(question)
        return EngineView(3, [StepRecord(1.0, 2.0, 0, 1, 1)], 0, [], {}, BlockMap(b"\0\2", 1, 0))

    with zmq.Context() as context, context.socket(zmq.DEALER) as launcher:
        launcher.connect(endpoint)
        launcher.send(b"")
        transport.await_launcher()
        launcher.send(msgspec.msgpack.encode(AskView(num_steps=2, keep_s=1.0)))
        assert transport.receive(5.0) == [], "an engine that offers none leaves the question"
        transport.offer_view(view)
        launcher.send(msgspec.msgpack.encode(AskView(num_steps=2, keep_s=1.0)))
        assert transport.receive(5.0) == [], "the executor has nothing to do with it"
        assert questions == [AskView(2, 0, 1.0)]
        [content] = launcher.recv_multipart()
        assert msgspec.msgpack.decode(content, type=Report) == view(questions[0])
    transport.close()


def test_secret_keys_are_for_one_user_and_never_replaced(tmp_path: Path) -> None:
    public, secret = make_certificates(tmp_path / "new", "engine")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert read_pair(secret).public == read_public(public)
    with pytest.raises(SluiceError, match="is there already; keys are never replaced"):
        make_certificates(tmp_path / "new", "engine")
    with pytest.raises(SluiceError, match=r"must be a name of a file, got '\.\./x'"):
        make_certificates(tmp_path, "../x")
    with pytest.raises(SluiceError, match="has no secret key"):
        read_pair(public)
    (tmp_path / "bad.key").write_text("nothing")
    with pytest.raises(SluiceError, match=r"bad.key is no certificate as `sluice engine keys` makes them"):
        read_public(tmp_path / "bad.key")
