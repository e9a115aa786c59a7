"""A real server with routes over local models, adapters and hosted ones, of which tests say how they answer."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client import generate_latest

from sluice.engine.config import EngineConfig
from sluice.gateway.assembly import make_application, make_server
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url
from sluice.gateway.options.config import ServeConfig, read_config
from sluice.gateway.server import Server
from sluice.gateway.tenancy.access.identity import Identity
from sluice.gateway.tenancy.access.keys import make_key
from tests.engine.capable import CapableEngine
from tests.gateway.front.http.live import SteppedRunner
from tests.gateway.repositories import llm_model
from tests.paths import RILL_TOKENIZER
from tests.pipelines.remote.remote_api import RemoteApi, chunk, replying, streaming, usage
from tests.waiting import PATIENCE_S

REFUSING = "http://127.0.0.1:9/v1"
"""The port of discard, where nothing listens."""
QUICK = {"retry_delay_ms": 1}
LOCAL_CACHE = {"--cache-config": ["local,size=10000000"]}
PROMPT = "Where does the water go?"


@dataclass
class RoutedServer:
    """A running server and its parts."""

    server: Server
    client: httpx.AsyncClient
    url: str
    engines: Mapping[str, CapableEngine]
    runners: Mapping[str, SteppedRunner]
    num_keys: int = field(default=0)

    async def chat(self, model: str, header: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """Ask a question. Four tokens of a greedy answer, unless the fields say otherwise."""
        messages = [{"role": "user", "content": PROMPT}]
        body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=header)

    async def metric(self, sample: str) -> float:
        """Return the value of a sample such as `name{label="x"}`, 0 where there is none."""
        for line in generate_latest(self.server.metrics.registry).decode().splitlines():
            if line.startswith(sample + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def make_key(self, **fields: Any) -> dict[str, str]:
        """Return the header with a new key."""
        ring = self.server.accounts.calls.access.ring
        assert ring.store is not None
        self.num_keys += 1
        new = make_key(Identity(**{"name": f"key-{self.num_keys}", **fields}))
        await ring.store.add(new.stored)
        await ring.refresh()
        return {"authorization": f"Bearer {new.text}"}

    async def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the ledger, as the server's own route shows them."""
        assert self.server.accounts.ledger is not None
        await self.server.plane.wait_idle(PATIENCE_S)
        await self.server.accounts.ledger.flush()
        answer = await self.client.get("/v1/usage/requests")
        return [json.loads(line) for line in answer.text.splitlines()]

    async def breaker(self, route: str, target: str) -> str:
        """Return the state of a target's breaker, as clients see it."""
        described = (await self.client.get(f"/v1/models/{route}")).json()["route"]
        return next(str(each["state"]) for each in described["targets"] if each["model"] == target)


def text_of(answer: httpx.Response) -> str:
    """Return the text of a whole chat's first choice."""
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def error_of(answer: httpx.Response) -> str:
    message: str = answer.json()["error"]["message"]
    return message


def answering(text: str) -> Any:
    """Return an API's answer: the text in two pieces, streamed."""
    return streaming(chunk(text[:2]), chunk(text[2:]), chunk("", "stop"), usage(5, 2))


def failing(status: int, message: str = "no", headers: Mapping[str, str] | None = None, **fields: Any) -> Any:
    """Return an API's refusal."""
    return replying({"error": {"message": message, **fields}}, status, headers)


def hosted_config(url: str, **parameters: object) -> str:
    """Return the config.pbtxt of a model behind an API. Our own client tries nothing again."""
    settings = {"base_url": url, "max_retries": 0, **parameters}
    return 'backend: "openai"\n' + "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in settings.items()
    )


@asynccontextmanager
async def routed_server(
    folder: Path,
    routes: Mapping[str, Any],
    *,
    local: tuple[str, ...] = ("rill",),
    hosted: Mapping[str, str] | None = None,
    endpoint: str = "chat",
    num_tokens: Mapping[str, int] | None = None,
    flags: Mapping[str, Any] | None = None,
    checkpoint: Path = RILL_TOKENIZER,
) -> AsyncIterator[RoutedServer]:
    """Serve local models, each over a stand-in for an engine, and hosted ones by URL, all of one `endpoint`.
    `num_tokens` are contexts."""
    repository = folder / "models"
    repository.mkdir(exist_ok=True)
    for name, url in (hosted or {}).items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(hosted_config(url, endpoint=endpoint))
    path = folder / "routes.yaml"
    path.write_text(yaml.safe_dump({"routes": dict(routes)}))
    config = read_config(
        {
            "--model-repository": [str(repository)],
            "--state-path": str(folder / "state"),
            "--ledger": str(folder / "ledger.sqlite"),
            **({"--routes": str(path)} if routes else {}),
            **(flags or {}),
        },
        {},
    )
    async with AsyncExitStack() as stack:
        yield await _start(stack, config, local, num_tokens or {}, checkpoint)


async def _start(
    stack: AsyncExitStack, config: ServeConfig, local: tuple[str, ...], contexts: Mapping[str, int], checkpoint: Path
) -> RoutedServer:
    server = make_server(config)
    stack.push_async_callback(server.rooms.close)
    await server.accounts.calls.access.ring.start()
    runners, engines = {}, {}
    for name in local:
        runner = runners[name] = SteppedRunner(256)
        runner.info = replace(runner.info, max_model_len=contexts.get(name, runner.info.max_model_len))
        engine = engines[name] = CapableEngine(EngineConfig(model_path="none"), runner)
        await engine.start()
        stack.push_async_callback(engine.stop)
        stack.callback(runner.release)
        server.plane.repository.add(llm_model(name, checkpoint, engine, server.metrics))
    await server.plane.repository.start(config.repository.load)
    server.plane.routes.check({entry.name for entry in server.plane.repository.index()})
    server.plane.health.begin_serving()
    listener = listen("127.0.0.1", 0, "--http-port")
    stack.callback(listener.close)
    http = HttpServer(make_application(server, config), listener)
    http.start()
    stack.push_async_callback(http.stop, PATIENCE_S)
    url = listener_url(listener)
    client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S))
    return RoutedServer(server, client, url, engines, runners)


def num_asked(api: RemoteApi) -> int:
    return len(api.exchanges)


def targets(*models: str, **settings: Any) -> dict[str, Any]:
    """Return a route over models."""
    return {"targets": [{"model": each} for each in models], **QUICK, **settings}
