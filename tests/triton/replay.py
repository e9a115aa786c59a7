"""Sends a live server the recorded questions and compares its answers with the real server's.

    python -m tests.triton.replay --http http://127.0.0.1:8000 --grpc 127.0.0.1:8001 [--only TEXT] [-v]

Exchanges run in order and carry state (loads, shared memory, sequences, settings), so begin with a fresh server.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import paths
from tests.triton.compare import Verdict, compare
from tests.triton.records import Exchange, read_exchanges
from tests.triton.wire import open_wire

EXCHANGES = paths.DATA / "triton" / "exchanges.jsonl"


@dataclass(frozen=True, slots=True)
class Replayed:
    name: str
    protocol: str
    verdict: Verdict
    reasons: tuple[str, ...]


def replay(exchanges: Iterable[Exchange], http_url: str, grpc_address: str) -> list[Replayed]:
    return list(replay_each(exchanges, http_url, grpc_address))


def replay_each(exchanges: Iterable[Exchange], http_url: str, grpc_address: str) -> Iterator[Replayed]:
    with open_wire(http_url, grpc_address) as wire:
        for exchange in exchanges:
            comparison = compare(exchange, wire.ask(exchange))
            reasons = (*comparison.differences, *comparison.wordings)
            yield Replayed(exchange.name, exchange.protocol, comparison.verdict, reasons)


def chosen(exchanges: Iterable[Exchange], only: str) -> Iterator[Exchange]:
    """Keep local steps: the chosen exchanges may need their shared memory."""
    return (exchange for exchange in exchanges if exchange.protocol == "local" or only in exchange.name)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="http://127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--exchanges", type=Path, default=EXCHANGES)
    parser.add_argument("--only", default="", help="ask only those with this text in the name")
    parser.add_argument("-v", "--verbose", action="store_true", help="list the matches too")
    options = parser.parse_args(arguments)
    tally: Counter[Verdict] = Counter()
    for replayed in replay_each(chosen(read_exchanges(options.exchanges), options.only), options.http, options.grpc):
        tally[replayed.verdict] += 1
        if options.verbose or replayed.verdict is not Verdict.MATCH:
            report = [f"{replayed.verdict:<8} {replayed.protocol:<5} {replayed.name}", *replayed.reasons[:6]]
            sys.stdout.write("\n         ".join(report) + "\n")
    sys.stdout.write(", ".join(f"{tally[verdict]} {verdict}" for verdict in Verdict) + "\n")
    return 1 if tally[Verdict.DIFFERS] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
