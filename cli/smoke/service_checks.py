"""Checks of what surrounds the answers: health, keys, bad input, clients that leave, metrics."""

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx
import orjson

from sluice.cli.server import JsonObject
from sluice.cli.smoke.deployment import Deployment, SmokeFailedError, SmokeSkippedError, describe, shorten
from sluice.gateway.watch.live.scrape import Change, Scrape

_CANCEL_S = 10.0
"""Seconds in which a server must notice a client's disconnect and count it."""
_LOOK_EVERY_S = 0.1
_CANCELLED_TOKENS = 400


async def check_health(deployment: Deployment) -> str:
    """The health routes of all protocols."""
    for path in ("/v2/health/live", "/v2/health/ready"):
        await deployment.send("GET", path)
    health = await deployment.get("/health")
    if health.get("status") not in ("ok", "degraded"):
        raise SmokeFailedError(f"/health: {shorten(orjson.dumps(health))}")
    return f"live, ready, {health['status']}"


async def check_models(deployment: Deployment) -> str:
    """The models; later checks ask those that this one chooses."""
    names = await deployment.find_models()
    if not names:
        raise SmokeFailedError("/v1/models lists no model")
    asked = [name for name in (deployment.language_model, deployment.encoder) if name]
    return f"{len(names)} ready; this examination asks {' and '.join(asked) or 'none of them'}"


async def check_keys(deployment: Deployment) -> str:
    """Requests without a key, or with a wrong one, are refused where the deployment has keys."""
    url = f"{deployment.target.url}/v1/models"
    statuses = {}
    async with httpx.AsyncClient(timeout=deployment.target.timeout_s, trust_env=False) as stranger:
        for who, headers in (("no key", {}), ("a wrong key", {"authorization": "Bearer sk-wrong"})):
            try:
                statuses[who] = (await stranger.get(url, headers=headers)).status_code
            except httpx.HTTPError as error:
                raise SmokeFailedError(f"GET {url}: {describe(error)}") from None
    if all(status == 200 for status in statuses.values()) and deployment.target.api_key is None:
        raise SmokeSkippedError("no key is asked for: whoever reaches the port may use it (sluice keys create)")
    for who, status in statuses.items():
        if status != 401:
            raise SmokeFailedError(f"/v1/models with {who}: status {status}, expected 401")
    return "refused without a key and with a wrong one"


@dataclass(frozen=True, slots=True)
class _BadRequest:
    """A request that must be refused, the status, and the text that the error must contain."""

    path: str
    content: bytes
    status: int
    named: str
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


async def check_bad_input(deployment: Deployment) -> str:
    """Bad requests get an error in the protocol's shape, which names what is wrong."""
    requests = _bad_requests(deployment.language_model)
    for bad in requests:
        response = await deployment.try_to_send(bad.method, bad.path, content=bad.content, headers=bad.headers)
        what = f"{bad.method} {bad.path} with {shorten(bad.content)}"
        if response.status_code != bad.status:
            raise SmokeFailedError(f"{what}: status {response.status_code}, expected {bad.status}")
        if bad.named not in _error_text(what, response):
            raise SmokeFailedError(f"{what}: {shorten(response.content)} does not name {bad.named!r}")
    return f"{len(requests)} bad requests refused by name"


def _bad_requests(model: str) -> list[_BadRequest]:
    requests = [
        _BadRequest("/v1/chat/completions", _ask("no-such-model"), 404, "no-such-model"),
        _BadRequest("/v1/chat/completions", b'{"model": ', 400, ""),
        _BadRequest("/v2/models/no-such-model/infer", b'{"inputs": []}', 404, "no-such-model"),
        _BadRequest("/v1/no-such-route", b"", 404, "", method="GET"),
    ]
    if model:
        for name, value in (("max_tokens", "many"), ("temperature", -1), ("max_tokens", -1), ("stream", "perhaps")):
            requests.append(_BadRequest("/v1/chat/completions", _ask(model, **{name: value}), 400, name))
    return requests


def _ask(model: str, **fields: Any) -> bytes:
    return orjson.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], **fields})


def _error_text(what: str, response: httpx.Response) -> str:
    """Return the error's message and field. Both protocols have a member `error`: OpenAI an object, v2 a text."""
    try:
        error: Any = orjson.loads(response.content)["error"]
        text = error if isinstance(error, str) else f"{error['message']} {error.get('param')}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise SmokeFailedError(f"{what}: {shorten(response.content)} is no error in the protocol's shape") from None
    return text


async def check_cancel(deployment: Deployment) -> str:
    """A client that leaves in the middle of a stream ends its generation."""
    model = deployment.required_language_model()
    before = await deployment.scrape()
    body: JsonObject = {"model": model, "prompt": "Hello", "max_tokens": _CANCELLED_TOKENS, "ignore_eos": True}
    async with deployment.stream("/v1/completions", {**body, "stream": True}) as response:
        async for _ in response.aiter_bytes():
            break
    left = monotonic()
    while monotonic() - left < _CANCEL_S:
        change = Change(before, await deployment.scrape())
        if change.increase("sluice_requests_total", model=model, outcome="cancelled"):
            return f"counted as cancelled within {monotonic() - left:.1f} s of the client's leaving"
        await asyncio.sleep(_LOOK_EVERY_S)
    raise SmokeFailedError(
        f"a client left a stream of {_CANCELLED_TOKENS} tokens, and {_CANCEL_S:.0f} s later no further request of "
        f"{model} counts as cancelled in sluice_requests_total"
    )


class MetricsCheck:
    """Requires that the metrics count what the other checks have done, between two readings."""

    def __init__(self) -> None:
        self._before: Scrape | None = None

    async def begin(self, deployment: Deployment) -> str:
        """The metrics can be read."""
        self._before = await deployment.scrape()
        return f"{len(self._before.samples)} kinds of samples"

    async def end(self, deployment: Deployment) -> str:
        """The metrics have moved with the requests of this examination."""
        if self._before is None:
            raise SmokeSkippedError("the metrics could not be read at the beginning")
        model = deployment.required_language_model()
        change, moved = Change(self._before, await deployment.scrape()), {}
        for what, name, labels in (
            ("requests", "sluice_requests_total", {"outcome": "ok"}),
            ("prompt tokens", "sluice_prompt_tokens_total", {}),
            ("generated tokens", "sluice_generation_tokens_total", {}),
        ):
            moved[what] = change.increase(name, model=model, **labels)
            if moved[what] <= 0:
                raise SmokeFailedError(f"{name} of {model} did not rise while this examination asked it")
        return ", ".join(f"{count:.0f} {what}" for what, count in moved.items()) + " more than before"
