"""A stream ends with an error of its protocol once the key that opened it is revoked or expires."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from time import time
from typing import Any

import grpc
import pytest

from sluice.gateway.calls import CallLog
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.streams import ResumeOptions
from sluice.gateway.tenancy.access import control
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.identity import Identity
from sluice.gateway.tenancy.access.keys import make_key, revoke_key
from sluice.gateway.tenancy.access.ring import KeyRing
from tests.gateway.api.v2.grpc.parts import HeldModel, infer_request, serving
from tests.gateway.api.v2.small_service import SmallService
from tests.gateway.front.http.live import MODEL, live_server
from tests.gateway.tenancy.access.test_access import ALL, Keys

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
LONG = {"model": MODEL, "prompt": [5, 6], "max_tokens": 200, "stream": True}
SAID = "with which this was begun, is revoked or has expired"
STREAMS: dict[str, tuple[str, str, Any, str]] = {
    "completions": ("POST", "/v1/completions", LONG, 'data: {"error":{"message":"'),
    "responses": (
        *("POST", "/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 200, "stream": True}),
        'data: {"type":"error",',
    ),
    "messages": (
        *("POST", "/v1/messages", CHAT | {"max_tokens": 200}),
        'data: {"type":"error","error":{"type":"authentication_error",',
    ),
    "ollama": (
        "POST",
        "/api/generate",
        {"model": MODEL, "prompt": "Hi", "options": {"num_predict": 200}},
        '{"error":"',
    ),
    "generate_stream": (
        *("POST", f"/v2/models/{MODEL}/generate_stream", {"text_input": "Hi", "max_tokens": 200}),
        'data: {"error":"',
    ),
    "live": ("GET", "/v1/admin/live", None, 'data: {"error":{"message":"'),
}
"""Streams of each protocol, and how the error at their end begins."""


@pytest.fixture(scope="module")
def keys() -> Iterator[Keys]:
    with live_server(ServeConfig(streams=ResumeOptions(resume_s=20.0))) as live:
        found = Keys(live)
        found.make(name="first")
        yield found


@contextmanager
def held(keys: Keys) -> Iterator[None]:
    """Have generations stop after a few tokens, until the end."""
    keys.live.runner.hold_after(4)
    try:
        yield
    finally:
        keys.live.runner.release()
        keys.live.wait_idle()


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_ends_with_its_key(keys: Keys, kind: str) -> None:
    method, path, body, error = STREAMS[kind]
    header = keys.make(name=f"{kind} reader", groups=ALL)
    with held(keys), keys.live.client.stream(method, path, json=body, headers=header) as response:
        lines = response.iter_lines()
        read = [next(lines)]
        keys.revoke(f"{kind} reader")
        read += [each for each in lines if each]
    assert (read[-1][: len(error)], SAID in read[-1]) == (error, True)


def test_a_resumable_stream_ends_with_its_key(keys: Keys) -> None:
    header = keys.make(name="resumer") | {"x-sluice-resumable": "true"}
    with held(keys), keys.live.client.stream("POST", "/v1/completions", json=LONG, headers=header) as response:
        lines = response.iter_lines()
        read = [next(lines)]
        keys.live.run(keys.store.change("resumer", revoke_key))  # as `sluice keys revoke` does, in the store alone
        read += [each for each in lines if each]
    assert SAID in json.loads(read[-1].removeprefix("data: "))["error"]["message"]


def test_a_stream_ends_when_its_key_expires(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    header = keys.make(name="brief", expires_at=time() + 3600)
    with held(keys), keys.live.client.stream("POST", "/v1/completions", json=LONG, headers=header) as response:
        lines = response.iter_lines()
        read = [next(lines)]
        monkeypatch.setattr(control, "time", lambda: time() + 3601)
        keys.live.run(keys.access.ring.refresh())
        read += [each for each in lines if each]
    assert json.loads(read[-1].removeprefix("data: "))["error"]["code"] == "invalid_api_key"


def test_the_streams_of_other_keys_go_on(keys: Keys) -> None:
    header, other = keys.make(name="goes"), keys.make(name="stays")
    with keys.live.client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 40}, headers=other) as response:
        lines = response.iter_lines()
        next(lines)
        keys.revoke("goes")
        assert keys.live.get("/v1/models", headers=header).status_code == 401
        read = [each for each in lines if each]
    assert read[-1] == "data: [DONE]"


async def test_a_grpc_stream_ends_with_its_key() -> None:
    new = make_key(Identity(name="ci"))
    ring = KeyRing(None)
    ring.keep([new.stored])
    model = HeldModel()
    service = SmallService(model)
    service.calls = CallLog(AccessControl(ring))
    async with serving(service) as running:
        call = running.stub.ModelStreamInfer(metadata=[("authorization", f"Bearer {new.text}")])
        await call.write(infer_request("held", 1, id="a"))
        await model.until(lambda: len(model.jobs) == 1)
        ring.keep([revoke_key(new.stored)])
        ring.on_look()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        await model.until(lambda: model.cancelled == ["a"])
    assert (ended.value.code(), SAID in (ended.value.details() or "")) == (grpc.StatusCode.UNAUTHENTICATED, True)
