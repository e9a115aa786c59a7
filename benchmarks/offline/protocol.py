"""What a worker hears and says: one JSON object a line. Standard library only, as each peer's environment has it."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Request = tuple[list[int], int]
"""Prompt token ids, and how many tokens to generate: exactly so many, greedy, whatever they are."""
FIRST: Request = ([1, 2, 3, 4, 5, 6, 7, 8], 1)


@dataclass(frozen=True, slots=True)
class Options:
    """How every engine is set up alike. `model` is a folder that the engine reads."""

    model: str
    kv_cache_gib: int
    num_threads: int


class Engine(Protocol):
    """A loaded engine as the comparison drives it."""

    version: str

    def batch(self, requests: list[Request]) -> int:
        """Run all requests at once; returns the number of tokens generated."""

    def single(self, request: Request) -> list[float]:
        """Run one request alone; returns when each token came, by `time.perf_counter`."""


def serve(load: Callable[[Options], Engine]) -> None:
    """Load the engine that argv describes, generate one token, say so, then do jobs until stdin ends.

    What libraries print goes to stderr: stdout is the protocol's.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model, kv_cache_gib, num_threads = sys.argv[1:]
    engine = load(Options(model, int(kv_cache_gib), int(num_threads)))
    engine.single(FIRST)
    answers.write(json.dumps({"version": engine.version}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer(engine, json.loads(line))) + "\n")


def answer(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Do one job: `batch` with requests, or `single` with one. Times are seconds from its start."""
    requests: list[Request] = [(token_ids, num_tokens) for token_ids, num_tokens in job["requests"]]
    started = time.perf_counter()
    if job["kind"] == "single":
        return {"token_times_s": [at - started for at in engine.single(requests[0])]}
    num_tokens = engine.batch(requests)
    return {"seconds": time.perf_counter() - started, "num_tokens": num_tokens}
