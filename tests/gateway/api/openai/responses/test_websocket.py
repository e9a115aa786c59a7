"""Responses over WebSocket, as OpenAI's own client and a stock WebSocket client see them."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from typing import Any, cast

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from sluice.gateway.api.openai.responses import socket_session, websocket
from sluice.gateway.api.openai.responses.prompt import EarlierTurns
from sluice.gateway.api.openai.responses.reply import ResponseReply
from sluice.gateway.api.openai.responses.socket_session import MemoryBudget, ResponseMemory, SocketSession
from sluice.gateway.front.http.switching import Upgrade
from sluice.gateway.front.http.websocket import MessageSocket, SocketMessage
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.http import HttpOptions
from sluice.gateway.options.responses import ResponsesOptions
from tests.gateway.api.openai.responses.test_create import SENT, events_of, prompt_ids
from tests.gateway.front.http.live import MODEL, LiveServer, live_server
from tests.waiting import PATIENCE_S, turns_of, wait_until

PATH = "/v1/responses"
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
BODY: dict[str, Any] = {"model": MODEL, "store": False, "max_output_tokens": 6, "temperature": 0}
KEPT = ("id", "item_id", "created_at", "completed_at", "response", "item")
NOTHING = ServeConfig(responses=ResponsesOptions(store="none"))


def url_of(live: LiveServer) -> str:
    return f"ws{live.url.removeprefix('http')}{PATH}"


@contextmanager
def connected(live: LiveServer, **settings: Any) -> Iterator[Connection]:
    with connect(url_of(live), open_timeout=PATIENCE_S, **settings) as connection:
        yield connection


def send(connection: Connection, **fields: Any) -> None:
    connection.send(json.dumps({"type": "response.create", **BODY, **fields}))


def receive(connection: Connection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(connection.recv(PATIENCE_S))
    return event


def answer(connection: Connection) -> list[dict[str, Any]]:
    """Return the events up to the last one of a response."""
    events = [receive(connection)]
    while events[-1]["type"] not in LAST:
        events.append(receive(connection))
    return events


def ask(connection: Connection, **fields: Any) -> dict[str, Any]:
    """Return the last event of the answer."""
    send(connection, **fields)
    return answer(connection)[-1]


def text_of(event: dict[str, Any]) -> str:
    text: str = event["response"]["output"][0]["content"][0]["text"]
    return text


def test_openais_client_goes_on_from_what_nothing_stores(live: LiveServer) -> None:
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client,
        client.responses.connect() as connection,
    ):
        turns, previous = [("user", "Hello")], None
        for question in ("Hello", "So?", "And then?"):
            turns = turns if question == "Hello" else [*turns, ("user", question)]
            expected = live.echo(prompt_ids(live, *turns), 6)
            created: Any = {**BODY, "input": question, "previous_response_id": previous or openai.omit}
            connection.response.create(**created)
            for event in connection:
                assert event.type != "error", event
                if event.type == "response.incomplete":
                    break
            assert event.type == "response.incomplete" and event.response.output_text == expected
            turns, previous = [*turns, ("assistant", expected)], event.response.id
    assert live.get(f"{PATH}/{previous}").status_code == 404


def test_the_events_are_those_of_a_stream_over_http(live: LiveServer) -> None:
    sent = {**SENT, "store": False}
    over_http = [data for _, data in events_of(live.post(PATH, {**sent, "stream": True}).text)]
    with connected(live) as connection:
        send(connection, **sent)
        over_socket = answer(connection)

    def shown(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in event.items() if name not in KEPT} for event in events]

    assert shown(over_socket) == shown(over_http)


@pytest.mark.parametrize("config", [None, NOTHING])
def test_a_response_that_failed_is_forgotten_with_the_one_that_it_follows(config: ServeConfig | None) -> None:
    with live_server(config or ServeConfig()) as live, connected(live) as connection:
        first, other = ask(connection, input="a")["response"]["id"], ask(connection, input="b")["response"]["id"]
        assert ask(connection, input="c", previous_response_id=first)["type"] == "response.incomplete"
        refused = ask(connection, input="c", previous_response_id=first, max_output_tokens=100_000)
        assert (refused["status"], refused["error"]["param"]) == (400, "max_output_tokens")
        lost = ask(connection, input="c", previous_response_id=first)
        assert (lost["status"], lost["error"]["code"]) == (400, "previous_response_not_found")
        assert ask(connection, input="c", previous_response_id=other)["type"] == "response.incomplete"


def test_a_stored_response_is_gone_on_from_on_any_connection(live: LiveServer) -> None:
    stored = live.post(PATH, {**SENT, "input": "Hello", "instructions": None, "max_output_tokens": 6}).json()
    turns = [("user", "Hello"), ("assistant", stored["output"][0]["content"][0]["text"]), ("user", "So?")]
    with connected(live) as connection:
        last = ask(connection, input="So?", previous_response_id=stored["id"], store=True)
    assert text_of(last) == live.echo(prompt_ids(live, *turns), 6)
    assert live.get(f"{PATH}/{last['response']['id']}").json() == last["response"]


def test_a_prompt_can_be_prepared_without_an_answer(live: LiveServer) -> None:
    with connected(live) as connection:
        warm = ask(connection, input="Hello", generate=False)
        assert (warm["type"], warm["response"]["output"]) == ("response.completed", [])
        last = ask(connection, input="So?", previous_response_id=warm["response"]["id"])
    assert text_of(last) == live.echo(prompt_ids(live, ("user", "Hello"), ("user", "So?")), 6)


CREATE = {"type": "response.create", **BODY, "input": "a"}


@pytest.mark.parametrize(
    ("message", "status", "code", "said"),
    [
        (b"\x00\x01", 400, "invalid_value", "must be JSON text, got a binary one"),
        ("{", 400, None, "is not valid JSON"),
        ("[]", 400, None, "must be a JSON object, got an array"),
        ({"type": "response.steer", "input": []}, 400, "invalid_value", "type must be 'response.create', got"),
        ({"input": "a"}, 400, "missing_required_parameter", "type is required"),
        ({**CREATE, "background": True}, 400, "invalid_value", "background must be false over WebSocket"),
        ({**CREATE, "model": "none"}, 404, "model_not_found", "none"),
        ({**CREATE, "temperature": 9}, 400, "invalid_value", "temperature must be"),
        ({**CREATE, "stream_id": 3}, 400, "invalid_type", "stream_id must be"),
        ({**CREATE, "previous_response_id": "resp_1"}, 400, "previous_response_not_found", "not found"),
        ({**CREATE, "input": "x" * (2 << 20)}, 413, "request_too_large", "at most 1048576 bytes"),
        (["{", '"a":', "1}"], 400, "missing_required_parameter", "type is required"),
    ],
)
def test_what_cannot_be_answered_is_an_event_and_the_connection_goes_on(
    small: LiveServer, message: Any, status: int, code: str | None, said: str
) -> None:
    with connected(small, additional_headers={"x-request-id": "mine"}) as connection:
        connection.send(json.dumps(message) if isinstance(message, dict) else message)
        event = receive(connection)
        error = event["error"]
        assert (event["type"], event["status"], error["code"]) == ("error", status, code), error
        assert said in error["message"] and error["headers"]["x-request-id"] == "mine-1"
        assert ask(connection, input="a")["type"] == "response.incomplete"


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server that takes a megabyte at most."""
    with live_server(ServeConfig(http=replace(HttpOptions(), max_input_bytes=1 << 20))) as running:
        yield running


def test_an_error_names_the_lane_of_a_message_that_cannot_be_read(live: LiveServer) -> None:
    with connected(live) as connection:
        assert ask(connection, input="a", stream_id="main", top_logprobs="x")["stream_id"] == "main"


def break_off(*_: Any) -> bytes:
    raise RuntimeError("broken")


@pytest.mark.parametrize("breaks", [("last",), ("last", "encode_error")])
def test_an_answer_that_breaks_off_ends_in_an_event(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, breaks: tuple[str, ...]
) -> None:
    with connected(live) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(ResponseReply, "last", break_off)
            if "encode_error" in breaks:
                patch.setattr(websocket.SocketTranslator, "encode_error", staticmethod(break_off))
            last = ask(connection, input="a", stream_id="main")
        assert (last["type"], last["status"], last["stream_id"]) == ("error", 500, "main")
        assert last["error"]["type"] == "server_error"
        assert ask(connection, input="a", stream_id="main")["type"] == "response.incomplete"


def test_a_connection_remembers_the_last_response_of_each_lane_and_as_many_others_as_there_is_room_for() -> None:
    memory, nothing = ResponseMemory(1000, MemoryBudget(1000)), EarlierTurns([], "")
    memory.keep("quiet", nothing, "quiet", None, 10)
    for number in range(100):
        memory.keep(f"{number}", nothing, "busy", None, 10)
    assert len(memory.turns) == 32 and {"quiet", "99", "98"} <= memory.turns.keys()
    memory.keep("long", nothing, "busy", "quiet", 900)
    assert len(memory.turns) < 12 and {"quiet", "99", "long"} <= memory.turns.keys()
    memory.keep("longer", nothing, "busy", "long", 5000)
    assert "longer" not in memory.turns and "long" in memory.turns


def test_connections_remember_no_more_together_than_there_is_room_for() -> None:
    budget, nothing = MemoryBudget(1000), EarlierTurns([], "")
    quiet, busy = ResponseMemory(1000, budget), ResponseMemory(1000, budget)
    quiet.keep("a", nothing, "", None, 400)
    busy.keep("b", nothing, "", None, 500)
    assert quiet.turns and busy.turns
    busy.keep("c", nothing, "other", None, 200)
    assert not quiet.turns and busy.turns.keys() == {"b", "c"}
    busy.clear()
    quiet.keep("d", nothing, "", None, 900)
    assert quiet.turns.keys() == {"d"} and not busy.turns


async def test_messages_that_come_at_once_begin_in_turns_of_the_loop_of_their_own() -> None:
    begun, turns = list[int](), count()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(next(turns))

    class Burst:
        num_open, num_left = 0, 20

        async def receive(self) -> SocketMessage | None:
            self.num_left -= 1
            return None if self.num_left < 0 else SocketMessage()

        def finish_one(self) -> None: ...

    kept = dict.fromkeys(("asgi", "http_version", "server", "client", "scheme", "root_path", "path", "raw_path"), "")
    scope = {**kept, "headers": [], "state": {"request_id": "a"}}
    upgrade = Upgrade(app, set(), lambda *_: None)
    session = SocketSession(scope, upgrade, cast(MessageSocket, Burst()), 1000, MemoryBudget(1000))
    await turns_of(session.run(), lambda: next(turns))
    assert len(begun) == 20 and all(later - earlier > 1 for earlier, later in pairwise(begun))


def test_lanes_go_side_by_side_and_messages_of_one_lane_in_their_order(live: LiveServer) -> None:
    with connected(live) as connection:
        live.runner.hold_after(0)
        try:
            for number, lane in enumerate(("a", "a", "b", None)):
                send(
                    connection, input=f"{number}", metadata={"n": f"{number}"}, **({"stream_id": lane} if lane else {})
                )
            wait_until(lambda: live.server.plane.num_open == 3)
        finally:
            live.runner.release()
        events: list[dict[str, Any]] = []
        while sum(event["type"] in LAST for event in events) < 4:
            events.append(receive(connection))
    begun = [event for event in events if event["type"] == "response.created"]
    numbers = {"a": ["0", "1"], "b": ["2"], None: ["3"]}
    for lane, expected in numbers.items():
        mine = [event for event in events if event.get("stream_id") == lane]
        assert [event["response"]["metadata"]["n"] for event in begun if event in mine] == expected
        ends = [event["type"] for event in mine if event["type"] in ("response.created", *LAST)]
        assert ends == ["response.created", "response.incomplete"] * len(expected)


def test_a_conversation_may_be_forked_onto_another_lane(live: LiveServer) -> None:
    with connected(live) as connection:
        first = ask(connection, input="Hello", stream_id="a")
        turns = [("user", "Hello"), ("assistant", text_of(first))]
        for lane in ("a", "b"):
            fork = ask(connection, input=lane, stream_id=lane, previous_response_id=first["response"]["id"])
            assert text_of(fork) == live.echo(prompt_ids(live, *turns, ("user", lane)), 6)


def test_more_messages_than_may_wait_are_refused(live: LiveServer) -> None:
    num_sent = socket_session.MAX_OPEN + 4
    with connected(live) as connection:
        live.runner.hold_after(0)
        try:
            for _ in range(num_sent):
                send(connection, input="a")
            refused = [receive(connection) for _ in range(4)]
        finally:
            live.runner.release()
        assert {event["status"] for event in refused} == {429}
        kinds: list[str] = []
        while kinds.count("response.incomplete") < socket_session.MAX_OPEN:
            kinds.append(receive(connection)["type"])
        assert "error" not in kinds


def test_a_client_that_leaves_frees_the_blocks_within_a_step(live: LiveServer) -> None:
    live.runner.hold_after(4)
    with connected(live) as connection:
        for lane in ("a", "b", "b"):
            send(connection, input="a", max_output_tokens=200, stream_id=lane)
        for _ in range(6):
            receive(connection)
        connection.socket.close()
    live.wait_idle()
    num_runs = live.runner.num_runs
    live.runner.release()
    assert live.blocks_used_after_step() == 0
    assert live.runner.num_runs - num_runs <= 2


def test_a_client_that_does_not_read_holds_up_nobody_else(live: LiveServer) -> None:
    with raw_socket(live) as slow:
        for _ in range(200):
            slow.sendall(frame(json.dumps(CREATE | {"max_output_tokens": 400}).encode()))
            slow.sendall(frame(b"x" * 100, opcode=9))
        with connected(live) as connection:
            assert ask(connection, input="a")["type"] == "response.incomplete"
        assert live.get("/health").status_code == 200
    live.wait_idle()


def frame(payload: bytes, opcode: int = 1) -> bytes:
    """Return a frame as clients send it, masked with zeros."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack("!H", size)
    return bytes([0x80 | opcode]) + length + bytes(4) + payload


HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@contextmanager
def raw_socket(live: LiveServer) -> Iterator[socket.socket]:
    """A connection whose client reads nothing but the handshake."""
    url = httpx.URL(live.url)
    assert url.port is not None
    with socket.create_connection((url.host, url.port), PATIENCE_S) as client:
        lines = [f"GET {PATH} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in HANDSHAKE.items())]
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        yield client


@pytest.mark.parametrize(
    "sent",
    [
        frame(b"\xff\xfe"),  # no UTF-8
        b"\x81\x05aaaaa",  # not masked
        b"\xf1\x80\x00\x00\x00\x00",  # reserved bits
        frame(b"x", opcode=3),
        frame(b"x", opcode=0),  # the rest of nothing
    ],
)
def test_what_is_no_websocket_ends_the_connection_alone(live: LiveServer, sent: bytes) -> None:
    with raw_socket(live) as client:
        client.sendall(sent)
        assert client.recv(65536).startswith(b"\x88")
    with connected(live) as connection:
        assert ask(connection, input="a")["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({}, 405, "to open a WebSocket"),
        ({**HANDSHAKE, "Sec-WebSocket-Version": "8"}, 400, "sec-websocket-version must be 13, got '8'"),
        ({**HANDSHAKE, "Sec-WebSocket-Key": "x"}, 400, "sec-websocket-key must be 16 bytes in base64"),
        ({**HANDSHAKE, "Origin": "http://elsewhere.test"}, 403, "Origin must be this server's own"),
        ({**HANDSHAKE, "Host": "elsewhere.test"}, 403, "Host must be a name of this server"),
    ],
)
def test_a_handshake_is_refused_as_any_request(
    live: LiveServer, headers: dict[str, str], status: int, said: str
) -> None:
    refused = httpx.get(f"{live.url}{PATH}", headers=headers)
    assert refused.status_code == status and said in refused.json()["error"]["message"]
    assert refused.headers["x-request-id"]


def test_a_handshake_behind_a_request_that_waits_is_declined(live: LiveServer) -> None:
    lines = [f"GET {PATH} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in HANDSHAKE.items())]
    live.runner.hold_after(0)
    try:
        with live.send("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1}) as connection:
            live.runner.wait_held()
            connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
            live.runner.release()
            answers = b"".join(iter(lambda: connection.recv(65536), b""))
    finally:
        live.runner.release()
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"HTTP/1.1 405 ") == 1


def test_a_handshake_needs_the_key_of_the_server() -> None:
    with live_server(ServeConfig(access=replace(AccessOptions(), api_key="sesame"))) as live:
        with pytest.raises(InvalidStatus) as refused, connected(live):
            raise AssertionError("it was accepted")
        assert refused.value.response.status_code == 401
        with connected(live, additional_headers={"Authorization": "Bearer sesame"}) as connection:
            assert ask(connection, input="a")["type"] == "response.incomplete"


def test_a_connection_ends_when_its_time_is_over_and_its_answers_are_complete(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[socket_session.SocketSession] = []

    class Noted(socket_session.SocketSession):
        async def run(self) -> None:
            sessions.append(self)
            await super().run()

    monkeypatch.setattr(websocket, "SocketSession", Noted)
    live.runner.hold_after(2)
    try:
        with connected(live) as connection:
            send(connection, input="a")
            live.runner.wait_held()
            live.loop.call_soon_threadsafe(sessions[0]._end)
            connection.send("{}")
            kinds = {}
            while "response.incomplete" not in kinds:
                event = receive(connection)
                kinds[event["type"]] = event
                if event["type"] == "error":
                    live.runner.release()
            assert kinds["error"]["error"]["code"] == "websocket_connection_limit_reached"
            assert receive(connection)["error"]["code"] == "websocket_connection_limit_reached"
            with pytest.raises(ConnectionClosed):
                connection.recv(PATIENCE_S)
    finally:
        live.runner.release()


def test_a_connection_of_an_hour_is_the_longest(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_session, "CONNECTION_S", 0.0)
    with connected(live) as connection:
        assert receive(connection)["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            connection.recv(PATIENCE_S)
