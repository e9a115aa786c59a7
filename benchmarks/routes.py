"""Measures what a route and the answer cache cost: the same requests to a model, through a route to it, and answered
from the cache; latency, and CPU time of the gateway. And the route's own code alone, over a model that only yields.

    python -m benchmarks.routes [--requests 300] [--tokens 64] [--rounds 5]

Requests are sent one after the other, in blocks of one kind that take turns. Medians are printed.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import cast

import httpx
import uvloop

from benchmarks.server import Server, running_server
from sluice.engine.client.stream import Consumer
from sluice.pipelines.answers.cache import AnswerSource
from sluice.pipelines.routes.route import Candidate, Route
from sluice.pipelines.routes.settings import parse_routes
from sluice.pipelines.routes.text import RoutedText
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.stream import Called, give
from sluice.pipelines.text.types import TextEvent, TextRequest

ROUTES = "routes: {routed: {targets: [{model: rill}]}, kept: {targets: [{model: rill}], cache: true}}\n"
TARGETS = [{"model": "a"}, {"model": "b"}]
_ALONE = 3000
"""Requests of a block without a server."""
KINDS = ("rill", "routed", "kept")


def _ask(client: httpx.Client, model: str, tokens: int, stream: bool) -> None:
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/chat/completions", json={**body, "stream": stream})
    answer.raise_for_status()


def _measure(server: Server, client: httpx.Client, options: argparse.Namespace, *, stream: bool) -> None:
    latencies: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    for kind in KINDS:
        _ask(client, kind, options.tokens, stream)
    for _ in range(options.rounds):
        for kind in KINDS:
            before = server.gateway_cpu_s()
            for _ in range(options.requests // options.rounds):
                began = perf_counter()
                _ask(client, kind, options.tokens, stream)
                latencies[kind].append(perf_counter() - began)
            cpu[kind].append((server.gateway_cpu_s() - before) / (options.requests // options.rounds))
    for kind in KINDS:
        latency, spent = statistics.median(latencies[kind]), statistics.median(cpu[kind])
        form = "streamed" if stream else "whole"
        print(f"{kind:<8} {form:<9} {options.tokens:>3} tokens {latency * 1e3:8.2f} ms {spent * 1e6:9.0f} us of CPU")


class _Yielding:
    """A model that yields as many events as there are tokens."""

    name = "a"
    parent = None
    max_model_len = 1024

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def generate(self, request: TextRequest, consumer: Consumer[TextEvent]) -> None:
        for _ in range(self._tokens):
            await give(consumer, TextEvent("x", 1, 5, 1))


def _routed(tokens: int, **fields: object) -> Callable[[], TextModel]:
    """Return what makes a route to two such models, as for each request."""
    settings = parse_routes({"routes": {"r": {"targets": TARGETS, **fields}}})["r"]
    route, model = Route("r", settings, lambda model, adapter: None), cast(TextModel, _Yielding(tokens))
    candidates = [Candidate(each, model) for each in route.targets]
    return lambda: RoutedText(route, candidates, AnswerSource())


async def _generate(make: Callable[[], TextModel]) -> float:
    """Return the microseconds of an answer."""
    request = TextRequest(request_id="id", prompt="text", sampling={"max_tokens": 16})
    began = perf_counter()
    for _ in range(_ALONE):
        await make().generate(request, Called(lambda event: None))
    return (perf_counter() - began) / _ALONE * 1e6


async def _measure_alone(tokens: int, rounds: int) -> None:
    model = cast(TextModel, _Yielding(tokens))
    kinds = {"model": lambda: model, "route": _routed(tokens), "hedging": _routed(tokens, hedge_after_ms=1000)}
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for kind, make in kinds.items():
            times[kind].append(await _generate(make))
    for kind, found in times.items():
        print(f"{kind:<8} alone     {tokens:>3} events {statistics.median(found):8.2f} us")


def main() -> None:
    """Measure on the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--requests", 300), ("--tokens", 64), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    for tokens in (1, options.tokens):
        uvloop.run(_measure_alone(tokens, options.rounds))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routes.yaml"
        path.write_text(ROUTES)
        flags = ("--routes", str(path), "--cache-config", "local,size=50000000", "--state-path", folder)
        with running_server(None, Path(folder) / "log", *flags) as server, httpx.Client(base_url=server.url) as client:
            for stream in (False, True):
                _measure(server, client, options, stream=stream)


if __name__ == "__main__":
    main()
