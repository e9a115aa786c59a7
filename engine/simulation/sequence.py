"""A sequence without tokens: what the planner and the KV cache manager read of one, and when it got its tokens."""

import math
from array import array

from sluice.engine.blocks import BlockHash, worst_case_blocks
from sluice.engine.queued import RequestSize
from sluice.engine.sequence import NO_ROW, Sequence
from sluice.engine.types import GenerateRequest, SamplingParams

_NO_REQUEST = GenerateRequest(request_id="", prompt_token_ids=[], sampling=SamplingParams())


class SimulatedSequence(Sequence):
    """A sequence of `num_prompt` tokens that ends after `length` output tokens. Times are simulated seconds."""

    __slots__ = ("admitted_at", "first_token_at", "gap_counts", "gaps", "hashes", "last_token_at", "length")

    def __init__(
        self,
        stream_id: int,
        num_prompt: int,
        length: int,
        max_tokens: int,
        hashes: list[BlockHash],
        block_size: int,
        now: float,
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        """`hashes` are those of the prompt's full blocks, `max_tokens` is what the request reserves blocks for."""
        # Everything that a sequence of real tokens has besides is left out: it would take most of the time and memory.
        blocks = worst_case_blocks(num_prompt, max_tokens, block_size)
        RequestSize.__init__(self, tenant, num_prompt, 0, num_prompt, max_tokens, blocks, length < max_tokens)
        self.stream_id = stream_id
        self.request = _NO_REQUEST
        self.priority = priority
        self.submitted_at = now
        self.deadline = self.start_deadline = math.inf
        self._block_size = block_size
        self.num_pending = self.num_charged = self.num_replayed = 0
        self.length = length
        self.table_row = NO_ROW
        self.num_allocated_blocks = self.num_indexed_blocks = self.num_computed = 0
        self.num_discarded = self.num_cached_tokens = 0
        self.was_preempted = self.is_returning = False
        self.drafts = []
        self.hashes = hashes
        self.admitted_at = self.first_token_at = self.last_token_at = math.nan
        self.gaps = array("d")
        """Seconds between its tokens, each as often as `gap_counts` says."""
        self.gap_counts = array("q")

    def block_hashes(self, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the first `num_blocks` blocks. Blocks with output are like no other's."""
        hashes = self.hashes
        while len(hashes) < num_blocks:
            content = b"out" + self.stream_id.to_bytes(8, "little") + len(hashes).to_bytes(5, "little")
            hashes.append(BlockHash(content))
        return hashes[:num_blocks]

    def take_tokens(self, count: int, at: float, step_s: float) -> None:
        """Take `count` tokens, of which the last comes at `at` and each but the first `step_s` after the one before."""
        if self.num_output == 0:
            self.first_token_at = at - (count - 1) * step_s
        else:
            self.gaps.append(at - (count - 1) * step_s - self.last_token_at)
            self.gap_counts.append(1)
        if count > 1:
            self.gaps.append(step_s)
            self.gap_counts.append(count - 1)
        self.last_token_at = at
        self.num_tokens += count
        self.num_output += count
