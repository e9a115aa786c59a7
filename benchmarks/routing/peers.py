"""The routers of others in the simulated fleet: NVIDIA Dynamo's and smg's, each as its makers publish it.

Each runs in a process of its own, which the simulation asks for each request and tells what happens to it. The router
sees what it would see of real replicas: Dynamo's KV events in vLLM's format over ZeroMQ, and the course of each
request; smg the requests themselves, which it sends on to workers that answer when the simulated replicas do. Both have
their own defaults.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.figures import BenchmarkError, ReportProgress
from benchmarks.offline.environments import Environment, interpreter
from sluice.engine.blocks import BlockHash
from sluice.engine.fleet.router import ReplicaView
from sluice.engine.simulation.fleet import SimulatedRouter
from sluice.engine.simulation.traces import TracedRequest

DYNAMO = Environment("dynamo", "ai-dynamo-runtime", "1.6.1")
SMG = Environment("smg", "smg", "1.13.0")
PEERS = ("Dynamo", "smg")
HASH_BYTES = 16
SUBSCRIPTION_S = 1.0
MARK_TOKEN = 1_000_000
"""The first token of the blocks that mark where Dynamo's index is. Prompts have none as high."""
HERE = Path(__file__).parent


@contextmanager
def running_peer(
    name: str, num_replicas: int, block_size: int, num_blocks: int, folder: Path, report: ReportProgress
) -> Iterator["DynamoRouter | SmgRouter"]:
    """Start the router of one of PEERS, installed under `folder` once, with replicas that have empty caches."""
    log = folder / f"routing-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as stderr:
        if name == "Dynamo":
            python = interpreter(DYNAMO, folder / "envs", report)
            with zmq.Context() as context:
                publishers, ports = _publishers(context, num_replicas)
                command = ("env", "DYN_LOG=error", python, HERE / "dynamo_worker.py", block_size, num_blocks, *ports)
                with _running(command, stderr) as process:
                    yield DynamoRouter(_Peer(process, log), publishers, block_size)
                for publisher in publishers:
                    publisher.close(linger=0)
        else:
            smg = interpreter(SMG, folder / "envs", report).with_name("smg")
            with _running((sys.executable, HERE / "smg_worker.py", smg, num_replicas), stderr) as process:
                yield SmgRouter(_Peer(process, log))


def _publishers(context: "zmq.Context[Any]", count: int) -> tuple[list["zmq.Socket[bytes]"], list[int]]:
    publishers = [context.socket(zmq.PUB) for _ in range(count)]
    for publisher in publishers:
        publisher.set_hwm(0)
    return publishers, [publisher.bind_to_random_port("tcp://127.0.0.1") for publisher in publishers]


@contextmanager
def _running(command: Sequence[object], stderr: Any) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class _Peer:
    """Says a JSON object a line, and hears one for each."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log
        self._hear()

    def say(self, **job: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"the router ended; see {self._log}")
        return json.loads(line)


@cache
def _piece(name: str, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of a piece that prompts share: the same for the same name."""
    return tuple(random.Random(name).choices(range(1000, 30_000), k=num_tokens))


def _tokens(request: TracedRequest, number: int) -> list[int]:
    """Return tokens for a prompt, equal to others' as far as the trace says so."""
    tokens = [token for name, num_tokens in request.parts for token in _piece(name, num_tokens)]
    rest = random.Random(f"request {number}").choices(range(1000, 30_000), k=request.num_prompt - len(tokens))
    return tokens + rest


class DynamoRouter(SimulatedRouter):
    """Dynamo's KV router. Its index hears of stored and removed blocks; answers' own blocks are left out, since no
    prompt of the trace has them.

    Events take a millisecond of the machine or more, in which no simulated time passes. So each message ends with a
    block of its own, the mark, and Dynamo chooses once it says that the replica has it."""

    name = "Dynamo"

    def __init__(self, peer: _Peer, publishers: "Sequence[zmq.Socket[bytes]]", block_size: int) -> None:
        self._peer, self._publishers, self._block_size = peer, publishers, block_size
        self._numbers = [0] * len(publishers)
        self._blocks: dict[bytes, tuple[bytes | None, list[int]]] = {}
        """Parent and tokens of each block of a prompt, by its hash."""
        self._marks = [0] * len(publishers)
        """The last mark of each replica's cache, 0 for none."""
        self._next_mark = MARK_TOKEN
        self._unseen: dict[int, list[int]] = {}
        """Tokens of the marks of replicas whose events the next choice waits for."""
        time.sleep(SUBSCRIPTION_S)
        for replica in range(len(publishers)):
            self._publish(replica, [])

    def choose(
        self,
        number: int,
        request: TracedRequest,
        hashes: Sequence[BlockHash],
        replicas: Sequence[ReplicaView],
        now: float,
    ) -> int:
        tokens, size, parent = _tokens(request, number), self._block_size, None
        for place, block_hash in enumerate(hashes):
            self._blocks.setdefault(block_hash, (parent, tokens[place * size : (place + 1) * size]))
            parent = block_hash
        unseen, self._unseen = self._unseen, {}
        return int(self._peer.say(job="choose", number=number, tokens=tokens, marks=[*unseen.items()]))

    def note_changes(self, replica: int, stored: bytes, removed: bytes) -> None:
        events: list[Any] = list(self._stored_events(_split(stored)))
        gone = [each for each in _split(removed) if each in self._blocks]
        if gone:
            events.append(_removed([_number(each) for each in gone]))
        if events:
            self._publish(replica, events)

    def _publish(self, replica: int, events: list[Any]) -> None:
        """Publish events, and a new mark in place of the replica's last one."""
        last, mark = self._marks[replica], self._next_mark
        self._marks[replica], self._next_mark = mark, mark + 1
        tokens = [mark] * self._block_size
        self._unseen[replica] = tokens
        removal = [_removed([last])] if last else []
        payload = msgspec.msgpack.encode([time.time(), [*events, *removal, self._stored([mark], None, tokens)], 0])
        self._publishers[replica].send_multipart((b"kv", self._numbers[replica].to_bytes(8, "big"), payload))
        self._numbers[replica] += 1

    def _stored(self, numbers: list[int], parent: int | None, tokens: list[int]) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": numbers,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": "GPU",
        }

    def _stored_events(self, stored: list[bytes]) -> Iterator[dict[str, Any]]:
        """Yield an event for each run of blocks that follow one another."""
        run: list[bytes] = []
        for block_hash in (*(each for each in stored if each in self._blocks), b""):
            if run and (not block_hash or self._blocks[block_hash][0] != run[-1]):
                parent = self._blocks[run[0]][0]
                tokens = [token for each in run for token in self._blocks[each][1]]
                yield self._stored([*map(_number, run)], None if parent is None else _number(parent), tokens)
                run = []
            run.append(block_hash)

    def note_first_token(self, number: int) -> None:
        self._peer.say(job="first", number=number)

    def note_end(self, number: int) -> None:
        self._peer.say(job="end", number=number)


def _removed(numbers: list[int]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": numbers, "medium": "GPU"}


def _number(block_hash: bytes) -> int:
    """Return the hash as vLLM publishes it by default. Dynamo reads no other form."""
    return int.from_bytes(block_hash[:8], "big")


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[begin : begin + HASH_BYTES] for begin in range(0, len(hashes), HASH_BYTES)]


class SmgRouter(SimulatedRouter):
    """smg's policy `cache_aware`, which guesses what caches have by the prompts that it has sent on: plain workers tell
    it nothing."""

    name = "smg"

    def __init__(self, peer: _Peer) -> None:
        self._peer = peer

    def choose(
        self,
        number: int,
        request: TracedRequest,
        hashes: Sequence[BlockHash],
        replicas: Sequence[ReplicaView],
        now: float,
    ) -> int:
        text = " ".join(map(str, _tokens(request, number)))
        return int(self._peer.say(job="choose", number=number, text=text))

    def note_first_token(self, number: int) -> None:
        self._peer.say(job="first", number=number)

    def note_end(self, number: int) -> None:
        self._peer.say(job="end", number=number)
