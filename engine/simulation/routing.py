"""The router of a simulated fleet: ours, or another one that is told the same."""

from collections.abc import Sequence
from typing import Protocol

from sluice.engine.blocks import BlockHash
from sluice.engine.fleet.prefix_index import PrefixIndex
from sluice.engine.fleet.router import ReplicaView, RoutedRequest, RouterSettings, RoutingPolicy, choose
from sluice.engine.simulation.traces import TracedRequest


class SimulatedRouter(Protocol):
    """A router as the simulation drives it. Requests have the numbers of their places in the trace."""

    name: str

    def choose(
        self,
        number: int,
        request: TracedRequest,
        hashes: Sequence[BlockHash],
        replicas: Sequence[ReplicaView],
        now: float,
    ) -> int:
        """Return the number of the replica that gets a request. `hashes` are those of the prompt's full blocks."""

    def note_changes(self, replica: int, stored: bytes, removed: bytes) -> None:
        """Take the hashes of blocks that a replica's cache has stored and removed."""

    def note_first_token(self, number: int) -> None:
        """Take that a request has its first token."""

    def note_end(self, number: int) -> None:
        """Take that a request has all its tokens."""


class FleetRouter:
    """The router of a gateway, with its prefix index and the replica of each session's last request."""

    def __init__(self, settings: RouterSettings, num_replicas: int, num_blocks: int) -> None:
        """`num_blocks` is what one replica's cache has room for."""
        self.name = str(settings.policy)
        self._settings = settings
        self._has_index = settings.policy is RoutingPolicy.PREFIX
        self._index = PrefixIndex(max_blocks=2 * num_replicas * num_blocks + 1024)
        self._numbers = [0] * num_replicas
        if self._has_index:
            for number in range(num_replicas):
                self._index.apply(number, 0, b"", b"", True)
        self._sessions: dict[str, str] = {}

    def choose(
        self,
        number: int,
        request: TracedRequest,
        hashes: Sequence[BlockHash],
        replicas: Sequence[ReplicaView],
        now: float,
    ) -> int:
        routed = RoutedRequest(
            ticket=number,
            num_prompt_tokens=request.num_prompt,
            max_tokens=request.max_tokens or request.num_output,
            block_hashes=hashes,
            session=request.session,
            session_replica=self._sessions.get(request.session, "") if request.session else "",
        )
        replica = choose(routed, replicas, self._index, self._settings).replica
        if request.session:
            self._sessions[request.session] = replica.name
        if self._has_index:
            self._index.expect(replica.number, hashes, now)
        return replica.number

    def note_changes(self, replica: int, stored: bytes, removed: bytes) -> None:
        if self._has_index:
            self._numbers[replica] += 1
            self._index.apply(replica, self._numbers[replica], stored, removed, False)

    def note_first_token(self, number: int) -> None:
        """The statistics of the replica tell it."""

    def note_end(self, number: int) -> None:
        """The statistics of the replica tell it."""
