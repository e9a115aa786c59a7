"""What waits: one sequence as the queue sees it, and sums over many."""

from typing import NamedTuple, Protocol


class Queued(Protocol):
    """What the queue reads of a sequence, once, when it is added."""

    @property
    def stream_id(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the first new one: prompt, and output to resume."""
        ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def worst_case_blocks(self) -> int: ...

    @property
    def start_deadline(self) -> float:
        """When it must have been admitted; `math.inf` for never."""
        ...

    @property
    def deadline(self) -> float: ...


class Backlog(NamedTuple):
    """Sums over sequences that wait."""

    num_requests: float = 0
    num_tokens: float = 0
    num_blocks: float = 0
    max_tokens: float = 0
    block_tokens: float = 0
    """Each one's blocks times its `max_tokens`: what it holds, for as long as it may."""

    @classmethod
    def of(cls, sequence: Queued) -> "Backlog":
        blocks, max_tokens = sequence.worst_case_blocks, sequence.max_tokens
        return cls(1, sequence.num_tokens, blocks, max_tokens, blocks * max_tokens)

    def plus(self, other: "Backlog", share: float = 1.0) -> "Backlog":
        """This and `share` of the other; a share of -1 takes it off."""
        return Backlog(
            self.num_requests + share * other.num_requests,
            self.num_tokens + share * other.num_tokens,
            self.num_blocks + share * other.num_blocks,
            self.max_tokens + share * other.max_tokens,
            self.block_tokens + share * other.block_tokens,
        )
