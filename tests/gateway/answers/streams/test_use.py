"""What kept streams count as: the tokens of an answer count once, for the request that began it."""

from collections.abc import Iterator

import pytest

from sluice.gateway.calls import Call, CallObserver
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.streams import ResumeOptions
from tests.gateway.front.http.live import MODEL, LiveServer, live_server
from tests.paths import DOCS
from tests.waiting import wait_until

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": "One two", "max_tokens": 6, "stream": True}


class Ended(CallObserver):
    """Notes the calls that have ended."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def end(self, call: Call) -> None:
        self.calls.append(call)

    def wait(self, number: int) -> list[Call]:
        wait_until(lambda: len(self.calls) >= number, lambda: self.calls)
        return self.calls


@pytest.fixture(scope="module")
def watched_live() -> Iterator[LiveServer]:
    with live_server(ServeConfig(streams=ResumeOptions(resume_s=20.0))) as running:
        yield running


@pytest.fixture
def ended(watched_live: LiveServer) -> Ended:
    found = Ended()
    watched_live.server.accounts.calls._observers = ()
    watched_live.server.accounts.calls.observe(found)
    return found


def test_a_replay_has_no_tokens(watched_live: LiveServer, ended: Ended) -> None:
    for _ in range(3):
        assert watched_live.post(PATH, BODY, headers={"idempotency-key": "use"}).status_code == 200
    calls = ended.wait(3)
    assert [each.generated_tokens for each in calls] == [6, 0, 0]
    assert [each.model for each in calls] == [MODEL, "", ""]


def test_a_stream_counts_whole_for_the_request_that_began_it(watched_live: LiveServer, ended: Ended) -> None:
    watched_live.runner.hold_after(3)
    headers = {"x-sluice-resume": "true"}
    with watched_live.client.stream("POST", PATH, json=BODY, headers=headers) as response:
        watched_live.runner.wait_held()
        path = f"/v1/streams/{response.headers['x-sluice-stream']}"
    assert not ended.calls
    watched_live.runner.release()
    assert watched_live.get(path).status_code == 200
    calls = {each.operation: each for each in ended.wait(2)}
    assert (calls[PATH].generated_tokens, calls[PATH].finish) == (6, "length")
    assert calls[path].generated_tokens == 0


def test_the_documented_client_reads_a_whole_stream(watched_live: LiveServer) -> None:
    """The example of docs/streams.md, as it stands there."""
    page = (DOCS / "streams.md").read_text()
    lines = page.partition("In Python, with httpx:\n\n")[2].partition("\n\nThe key finds")[0].splitlines()
    scope: dict[str, object] = {}
    imports = "import time\nimport httpx\nfrom uuid import uuid4\n"
    exec(imports + "\n".join(line.removeprefix("    ") for line in lines), scope)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
    events = list(scope["events"](watched_live.client, body))  # type: ignore[operator]
    assert events[-1] == "[DONE]"
    assert len(events) > 3


def test_keys_are_not_kept(watched_live: LiveServer) -> None:
    secrets = {"authorization": "Bearer s1", "x-api-key": "s2", "cookie": "s3", "x-sluice-collection-key": "s4"}
    headers = {"x-sluice-resume": "true", "x-sluice-priority": "3", "x-admin": "s5", **secrets}
    answer = watched_live.post(PATH, BODY, headers=headers)
    store = watched_live.streams
    assert store is not None
    kept = store._kept[answer.headers["x-sluice-stream"]].origin.headers
    assert dict(kept).keys() == {b"content-type", b"content-length", b"x-sluice-resume", b"x-sluice-priority"}
