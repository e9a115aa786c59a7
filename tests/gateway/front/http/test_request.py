import asyncio
import gc
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.http import request as request_module
from sluice.gateway.front.http.errors import install_error_handlers
from sluice.gateway.front.http.request import parse_scheduling, read_body, run_while_connected
from sluice.gateway.options.http import RequestOptions
from sluice.gateway.plane.models import find_session, session_in
from tests.errors import error_of
from tests.gateway.front.http.plain_server import serving

LIMIT = 1000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    async def echo(request: Request) -> Response:
        return Response(await read_body(request, LIMIT))

    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    install_error_handlers(app)
    with serving(app) as url:
        yield url


def chunked(num_bytes: int) -> Iterator[bytes]:
    """Yield a body in chunks, so that no header has its length."""
    for _ in range(num_bytes // 100):
        yield b"x" * 100


def test_what_is_allowed_arrives(url: str) -> None:
    for content in (b"", b"x", b"x" * LIMIT):
        assert httpx.post(url, content=content).content == content
    assert httpx.post(url, content=chunked(LIMIT)).content == b"x" * LIMIT


@pytest.mark.parametrize(
    ("size", "is_chunked", "told"),
    [(LIMIT + 1, False, "is 1001 bytes"), (LIMIT * 2, True, "is longer"), (4 << 20, False, "is 4194304 bytes")],
    ids=["its length is declared", "chunks are counted", "the rest of a large one does not hide the answer"],
)
def test_what_is_longer_is_refused(url: str, size: int, is_chunked: bool, told: str) -> None:
    response = httpx.post(url, content=chunked(size) if is_chunked else b"x" * size)
    message = f"request body {told}; at most 1000 bytes are allowed (--http-max-input-size)"
    assert (response.status_code, response.json()["error"]["message"]) == (413, message)


def request_with(*messages: Message) -> Request:
    """A request whose body comes as `messages` and then stops."""
    waiting = list(messages)

    async def receive() -> Message:
        if waiting:
            return waiting.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return Request({"type": "http", "headers": []}, receive)


def test_a_client_that_leaves_is_told_apart() -> None:
    half = {"type": "http.request", "body": b"half", "more_body": True}
    request = request_with(half, {"type": "http.disconnect"})
    with pytest.raises(ClientDisconnect):
        asyncio.run(read_body(request, LIMIT))


def test_a_client_that_stops_half_way_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "BODY_TIMEOUT_S", 0.01)
    request = request_with({"type": "http.request", "body": b"half", "more_body": True})
    with pytest.raises(SluiceError, match="stopped arriving") as caught:
        asyncio.run(read_body(request, LIMIT))
    assert caught.value.code is ErrorCode.DEADLINE


async def test_a_failure_in_the_turn_of_the_deadline_is_not_logged_as_lost() -> None:
    lost: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    work = asyncio.ensure_future(run_while_connected(request_with().receive, read_body(request_with({}), LIMIT)))
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait((work,))
    assert work.cancelled()
    del work
    gc.collect()
    assert not lost


NOTHING = RequestOptions()
BY_DEFAULT = {"tenant": "", "session": "", "parent_session": "", "priority": 0}


def test_without_headers_the_body_and_the_server_s_defaults_hold() -> None:
    scheduling = parse_scheduling({}, RequestOptions(timeout_s=5.0, queue_timeout_s=2.0))
    assert scheduling.fields(None) == BY_DEFAULT | {"timeout_s": 5.0, "queue_timeout_s": 2.0}
    assert scheduling.fields(7, 1.5) == BY_DEFAULT | {"priority": 7, "timeout_s": 1.5, "queue_timeout_s": 2.0}


def test_headers_win() -> None:
    headers = {
        "x-sluice-tenant": "ada & sons",
        "x-sluice-priority": "-3",
        "x-sluice-timeout-ms": "1500",
        "x-sluice-queue-timeout-ms": "250",
    }
    scheduling = parse_scheduling(headers, RequestOptions(timeout_s=5.0, queue_timeout_s=2.0))
    expected = BY_DEFAULT | {"tenant": "ada & sons", "priority": -3, "timeout_s": 1.5, "queue_timeout_s": 0.25}
    assert scheduling.fields(7, 9.0) == expected


def test_the_first_session_header_wins_over_the_sticky_key_and_the_body() -> None:
    options = RequestOptions(session_headers=("x-chat", "x-session-id"))
    sent = {"x-sluice-sticky": "sticky", "x-session-id": "second", "x-chat": "first"}
    found = []
    for name in ("x-chat", "x-session-id", "x-sluice-sticky", None):
        found.append(parse_scheduling(sent, options).fields(None, session="body")["session"])
        sent.pop(name or "", None)
    assert found == ["first", "second", "sticky", "body"]
    assert parse_scheduling({}, options).fields(None)["session"] == ""


CLAUDE_CODE = {"x-claude-code-session-id": "s"}
CODEX = {"session-id": "t0", "thread-id": "t1"}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (CLAUDE_CODE, ("s", "")),
        (CLAUDE_CODE | {"x-claude-code-agent-id": "s"}, ("s", "")),
        (CLAUDE_CODE | {"x-claude-code-agent-id": "a"}, ("s/a", "s")),
        (CLAUDE_CODE | {"x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"}, ("s/b", "s/a")),
        (CLAUDE_CODE | {"x-session-id": "own", "x-parent-session-id": "above"}, ("own", "above")),
        (CLAUDE_CODE | CODEX | {"x-session-affinity": "f", "x-sluice-sticky": "k"}, ("s", "")),
        ({"session_id": "t0"}, ("t0", "")),
        ({"session-id": "t0", "thread-id": "t0"}, ("t0", "")),
        (CODEX, ("t1", "t0")),
        (CODEX | {"x-codex-parent-thread-id": "p"}, ("t1", "p")),
        ({"x-codex-window-id": "t1:3", "x-codex-parent-thread-id": "p"}, ("t1", "p")),
        ({"x-session-affinity": "f"}, ("f", "")),
        ({"x-session-id": "", "x-session-affinity": "f", "x-parent-session-id": "p"}, ("f", "p")),
        ({"x-parent-session-id": "p", "x-claude-code-agent-id": "a"}, ("", "")),
    ],
)
def test_the_headers_of_agent_programs_name_the_session_and_its_parent(
    headers: dict[str, str], expected: tuple[str, str]
) -> None:
    assert find_session(headers, NOTHING.session_headers) == expected
    fields = parse_scheduling(headers, NOTHING).fields(None, session="body")
    assert (fields["session"], fields["parent_session"]) == (expected if expected[0] else ("body", ""))


def test_headers_of_agent_programs_count_where_the_server_names_another_header() -> None:
    assert find_session(CLAUDE_CODE | {"x-chat": "own"}, ("x-chat",)) == ("own", "")
    assert find_session(CLAUDE_CODE, ("x-chat",)) == ("s", "")


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("user_1f_account_2e_session_3d-4c", "3d-4c"),
        ('{"device_id": "d", "account_uuid": "", "session_id": "3d"}', "3d"),
        ('{"device_id": "d"}', '{"device_id": "d"}'),
        ('{"session_id": 3}', '{"session_id": 3}'),
        ('{"a": ' + "[" * 100_000, '{"a": ' + "[" * 100_000),
        ("somebody", "somebody"),
        ("ends_in_session_", "ends_in_session_"),
    ],
)
def test_a_session_is_taken_out_of_the_user_id_that_claude_code_sends(user_id: str, session: str) -> None:
    assert session_in(user_id) == session


def test_a_priority_of_0_in_a_header_is_one() -> None:
    assert parse_scheduling({"x-sluice-priority": "0"}, NOTHING).fields(7)["priority"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-sluice-tenant", "a" * 129),
        ("x-sluice-tenant", "a\x7f"),
        ("x-sluice-priority", "high"),
        ("x-sluice-priority", "1.5"),
        ("x-sluice-priority", "2147483648"),
        ("x-sluice-timeout-ms", "0"),
        ("x-sluice-timeout-ms", "-1"),
        ("x-sluice-timeout-ms", "1s"),
        ("x-sluice-queue-timeout-ms", "99999999999"),
    ],
)
def test_refuses_and_names_the_header(name: str, value: str) -> None:
    error = error_of(parse_scheduling, {name: value}, NOTHING)
    assert (error.code, error.param) == (ErrorCode.INVALID, name) and name in error.message
