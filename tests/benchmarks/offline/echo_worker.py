"""A worker whose engine computes nothing. The model's name says how it misbehaves."""

import os
import sys
import time

from benchmarks.offline.protocol import Request, WorkerOptions, serve


class EchoEngine:
    version = "echo 1"

    def __init__(self, options: WorkerOptions) -> None:
        self._model = options.model
        os.write(1, b"a library's greeting on stdout\n")
        if self._model == "unloadable":
            sys.exit("no such model")

    def batch(self, requests: list[Request]) -> int:
        if self._model == "crashing":
            os._exit(1)
        return sum(length for _, length in requests) - (self._model == "short")

    def single(self, request: Request) -> list[float]:
        return [time.perf_counter() for _ in range(request[1])]


if __name__ == "__main__":
    serve(EchoEngine)
