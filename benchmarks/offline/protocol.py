"""The protocol of a worker: one JSON object a line. It needs only the standard library, for the peers' environments."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Request = tuple[list[int], int]
"""Prompt token ids, and the exact number of tokens to generate greedily, end-of-sequence tokens included."""
FIRST: Request = ([1, 2, 3, 4, 5, 6, 7, 8], 1)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Settings that all engines share. `model` is a folder that the engine reads."""

    model: str
    kv_cache_gib: int
    num_threads: int


class Engine(Protocol):
    """A loaded engine."""

    version: str

    def batch(self, requests: list[Request]) -> int:
        """Run all requests at once. Returns the number of tokens generated."""

    def single(self, request: Request) -> list[float]:
        """Run one request alone. Returns the time of each token, by `time.perf_counter`."""


def serve(load: Callable[[WorkerOptions], Engine]) -> None:
    """Load the engine that argv describes, generate one token, report readiness, then do jobs until stdin ends.

    Output of libraries goes to stderr, since stdout carries the protocol.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model, kv_cache_gib, num_threads = sys.argv[1:]
    engine = load(WorkerOptions(model, int(kv_cache_gib), int(num_threads)))
    engine.single(FIRST)
    answers.write(json.dumps({"version": engine.version}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(engine, json.loads(line))) + "\n")


def answer(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job: `batch` with requests, or `single` with one. Times are seconds from its start."""
    requests: list[Request] = [(token_ids, num_tokens) for token_ids, num_tokens in job["requests"]]
    started = time.perf_counter()
    if job["kind"] == "single":
        return {"token_times_s": [at - started for at in engine.single(requests[0])]}
    num_tokens = engine.batch(requests)
    return {"seconds": time.perf_counter() - started, "num_tokens": num_tokens}
