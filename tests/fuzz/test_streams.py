"""Streams that are cut and come back to, anywhere and in any order: what follows is always the rest of the whole."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.streams import ResumeOptions
from tests.fuzz.running import fuzzed
from tests.gateway.front.http.live import MODEL, LiveServer, live_server

GREEDY: dict[str, Any] = {"model": MODEL, "stream": True, "temperature": 0}
CHAT = GREEDY | {"messages": [{"role": "user", "content": "Tell me."}]}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", GREEDY | {"prompt": "One two", "max_tokens": 24}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 20, "n": 2, "stream_options": {"include_usage": True}}),
    ("/v1/messages", CHAT | {"max_tokens": 20}),
    ("/v1/responses", GREEDY | {"input": "Tell me.", "max_output_tokens": 16}),
)
RESUMABLE = {"x-sluice-resume": "true"}
FOREIGN = "0" * 32


class Return(NamedTuple):
    """A client that comes back after `position` events of those it knows, and leaves after `num_bytes` more."""

    position: int
    num_bytes: int
    by_post: bool


returns = st.lists(
    st.builds(Return, st.integers(0, 90), st.sampled_from((0, 1, 300, 10**6)), st.booleans()), max_size=5
)


@pytest.fixture(scope="module")
def kept_live() -> Iterator[LiveServer]:
    with live_server(ServeConfig(streams=ResumeOptions(resume_s=60.0))) as running:
        yield running


class Reader:
    """A client of one stream. It keeps what it has read, by the number of the event before."""

    def __init__(self, live: LiveServer, path: str, body: dict[str, Any]) -> None:
        self._live, self._path, self._body = live, path, body
        self.stream_id = ""
        self.read: list[tuple[int, bytes]] = []

    def begin(self, num_bytes: int) -> None:
        with self._live.client.stream("POST", self._path, json=self._body, headers=RESUMABLE) as response:
            assert response.status_code == 200
            self.stream_id = response.headers["x-sluice-stream"]
            self.read.append((0, _some(response.iter_raw(), num_bytes)))

    def come_back(self, back: Return, num_events: int) -> None:
        """Come back after an event that was there."""
        position = min(back.position, num_events)
        if back.by_post and position:
            headers = {"last-event-id": f"{self.stream_id}:{position}"}
            request = self._live.client.build_request("POST", self._path, json=self._body, headers=headers)
        else:
            path = f"/v1/streams/{self.stream_id}"
            request = self._live.client.build_request("GET", path, params={"starting_after": position})
        response = self._live.client.send(request, stream=True)
        try:
            if response.status_code == 204:
                self.read.append((position, b""))
                return
            assert response.status_code == 200, response.read()
            self.read.append((position, _some(response.iter_raw(), back.num_bytes)))
        finally:
            response.close()

    @property
    def num_known(self) -> int:
        """How many events the client has seen whole."""
        return max(start + content.count(b"\n\n") for start, content in self.read)


def _some(pieces: Iterator[bytes], num_bytes: int) -> bytes:
    """Read until there are so many bytes, or the end."""
    read = b""
    while len(read) < num_bytes and (piece := next(pieces, b"")):
        read += piece
    return read


@fuzzed(12)
@given(st.sampled_from(REQUESTS), st.sampled_from((0, 1, 500, 2000, 10**6)), returns, returns)
def test_what_follows_is_the_rest_of_the_whole(
    kept_live: LiveServer, request_: tuple[str, dict[str, Any]], num_bytes: int, early: list[Return], late: list[Return]
) -> None:
    reader = Reader(kept_live, *request_)
    reader.begin(num_bytes)
    for each in early:  # while it is generated
        reader.come_back(each, reader.num_known)
    path = f"/v1/streams/{reader.stream_id}"
    whole = kept_live.get(path).content
    events = [event + b"\n\n" for event in whole.split(b"\n\n")[:-1]]
    for each in late:  # after its end
        reader.come_back(each, len(events))
    for position, content in reader.read:
        assert b"".join(events[position:]).startswith(content)
    for number, event in enumerate(events, 1):
        assert event.startswith(f"id: {reader.stream_id}:{number}\n".encode())
    assert kept_live.get(path, params={"starting_after": len(events) + 1}).status_code == 400
    assert kept_live.get(f"/v1/streams/{FOREIGN}").status_code == 404
    assert kept_live.request("DELETE", path).status_code == 204
    assert kept_live.get(path).status_code == 404


@fuzzed(30)
@given(
    st.text(alphabet="0123456789abcdef:-. \t\"'é%", max_size=40), st.text(alphabet="0123456789abcdef/.%", max_size=40)
)
def test_ids_that_are_none_are_refused(kept_live: LiveServer, event_id: str, stream_id: str) -> None:
    path, body = REQUESTS[0]
    headers = {"last-event-id": event_id.strip().encode("utf-8")}
    answer = kept_live.post(path, body | {"max_tokens": 1}, headers=headers)
    assert answer.status_code in (200, 400, 404)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "last-event-id"
    found = kept_live.get(f"/v1/streams/{stream_id.lstrip('/')}x", params={"starting_after": event_id})
    assert found.status_code in (400, 404)
    assert found.json()["error"]["message"]
