"""Gateways and engines in one process, whose messages travel when a test says so: each client and each engine has a
queue of what was sent and has not arrived. The executors are real, over runners that echo."""

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import TypeVar

import msgspec

from sluice.engine.client.base import EngineClient, Replica
from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.router import RouterSettings, RoutingPolicy
from sluice.engine.frames import AskProbe, Cancel, Command, ProbeTurn, StepFrame, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.process.transport import ProbeTurns
from sluice.engine.types import RequestFailed, TokenEvent
from tests.engine.fake_runner import EchoRunner
from tests.engine.scripted_executor import CommandScript

NUM_BLOCKS = 24
E = TypeVar("E", TokenEvent, RequestFailed)


class SimulatedClient(EngineClient):
    """One gateway's client of one engine."""

    can_restart = True

    def __init__(self, config: EngineConfig, engine: "SimulatedEngine") -> None:
        super().__init__(config)
        self.engine = engine
        self.outbox: deque[Command] = deque()
        self.inbox: deque[StepFrame | ProbeTurn] = deque()
        self._info = engine.executor.info
        engine.clients.append(self)

    async def start(self) -> None:
        """Do nothing: the engine is there."""

    async def stop(self) -> None:
        self._die("stopped")

    def _send(self, command: Command) -> None:
        self.outbox.append(command)

    def send_one(self) -> None:
        """Deliver the oldest command."""
        if self.outbox:
            self.engine.take(self, self.outbox.popleft())

    def receive_one(self) -> None:
        """Process the oldest report."""
        if self.inbox:
            report = self.inbox.popleft()
            if isinstance(report, ProbeTurn):
                self._on_probe_turn(report.stream_id)
            else:
                self._on_frame(report)

    def lose(self) -> None:
        """Notice that the engine is lost, after its last reports."""
        self._begin_recovery()
        while self.inbox:
            self.receive_one()
        self.outbox.clear()
        self._requeue_streams()

    def find_new(self) -> None:
        """Notice that there is a new engine."""
        self._info = self.engine.executor.info
        self._end_recovery(0.1)


class SimulatedEngine:
    """An engine that takes a step when it is told to."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.clients: list[SimulatedClient] = []
        self.now = 0.0
        self._begin()

    def _begin(self) -> None:
        runner = EchoRunner(num_blocks=NUM_BLOCKS, block_size=4, max_model_len=64)
        self.script = CommandScript()
        self.executor = InflightExecutor(runner, self.config, self.script.receive, self._emit, self._clock)
        self._client_of: dict[int, SimulatedClient] = {}
        self._turns = ProbeTurns(self._give_turn)
        self.held: dict[int, str] = {}
        """Ids of the requests that it has, by stream."""

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def _give_turn(self, client: bytes, stream_id: int) -> None:
        self.clients[int(client)].inbox.append(ProbeTurn(stream_id))

    def take(self, client: SimulatedClient, command: Command) -> None:
        match command:
            case AskProbe(stream_id):
                self._turns.ask(str(self.clients.index(client)).encode(), stream_id)
                return
            case Submit(stream_id, request):
                self._client_of[stream_id] = client
                self.held[stream_id] = request.request_id
            case Cancel(stream_id):
                self._turns.end(stream_id)
        self.script.pending.append(command)

    def step(self) -> None:
        self.executor.step()
        self.executor.check_invariants()
        stats = self.executor.stats()
        assert stats.num_blocks_reserved <= NUM_BLOCKS
        assert stats.num_blocks_used <= NUM_BLOCKS

    def _emit(self, frame: StepFrame) -> None:
        ended = {event.stream_id for event in frame.events if event.finish_reason is not None}
        ended |= {failure.stream_id for failure in frame.failures}
        for client in self.clients:
            part = msgspec.structs.replace(
                frame, events=self._part(frame.events, client), failures=self._part(frame.failures, client)
            )
            client.inbox.append(part)
        for stream_id in (*(each.stream_id for each in frame.events), *(each.stream_id for each in frame.failures)):
            self._turns.end(stream_id)
        for stream_id in ended:
            self.held.pop(stream_id, None)

    def _part(self, events: Sequence[E], client: SimulatedClient) -> list[E]:
        return [event for event in events if self._client_of.get(event.stream_id) is client]

    def crash(self) -> None:
        """End, and serve anew; what was under way to it is lost."""
        self._begin()
        for client in self.clients:
            client.lose()
        for client in self.clients:
            client.find_new()


class Simulation:
    """Several gateways before the same engines."""

    def __init__(
        self, num_gateways: int, num_engines: int, policy: RoutingPolicy = RoutingPolicy.PREFIX, **limits: object
    ) -> None:
        self._policy = policy
        config = msgspec.convert(
            {"model_path": "", "max_num_seqs": 3, "max_num_batched_tokens": 16, **limits}, EngineConfig
        )
        self.engines = [SimulatedEngine(config) for _ in range(num_engines)]
        self.gateways = [self._gateway(config) for _ in range(num_gateways)]
        self.streams: dict[str, GenerationStream] = {}

    def _gateway(self, config: EngineConfig) -> FleetClient:
        replicas = [Replica(str(number), SimulatedClient(config, engine)) for number, engine in enumerate(self.engines)]
        fleet = FleetClient(config, replicas, RouterSettings(policy=self._policy))
        fleet.watch()
        return fleet

    @property
    def clients(self) -> list[SimulatedClient]:
        return [client for engine in self.engines for client in engine.clients]

    def settle(self) -> None:
        """Let everything arrive and end."""
        deadline = perf_counter() + 60
        while self._is_busy() and perf_counter() < deadline:
            for client in self.clients:
                while client.outbox:
                    client.send_one()
            for engine in self.engines:
                engine.step()
            for client in self.clients:
                while client.inbox:
                    client.receive_one()
        assert not self._is_busy()

    def _is_busy(self) -> bool:
        return any(client.open_streams or client.outbox for client in self.clients)

    def check(self) -> None:
        """Assert that no request is in two engines."""
        held = [request_id for engine in self.engines for request_id in engine.held.values()]
        assert len(held) == len({*held}), "a request is in two engines"
