"""What the executor asks of a source of draft tokens."""

from typing import Protocol

from engine.config import EngineConfig, Speculation
from engine.kv.manager import KvCacheManager
from engine.runners.base import Runner
from engine.sequence import Sequence
from engine.speculation.draft_model import DraftModel
from engine.speculation.gate import TokenPrices
from engine.speculation.ngram import NgramDrafter


class Drafter(Protocol):
    """Used from the engine's thread. Drafts change no output: a wrong one costs its time and nothing else."""

    def propose(self, decoding: list[Sequence], prices: TokenPrices) -> None:
        """Set the `drafts` of each sequence before a step is planned; at most `max_drafts` of each."""
        ...

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step checked the first `num_drafts` drafts of the sequence."""
        ...

    def forget(self, stream_id: int) -> None:
        """The sequence has ended; unknown ones are no error."""
        ...


def make_drafter(config: EngineConfig, kv: KvCacheManager, draft_runner: Runner | None) -> Drafter | None:
    """The source of drafts that `config` asks for."""
    match config.speculation:
        case Speculation.OFF:
            return None
        case Speculation.NGRAM:
            return NgramDrafter(config.num_speculative_tokens)
        case Speculation.DRAFT_MODEL:
            assert draft_runner is not None, "the draft model is loaded before"
            return DraftModel(draft_runner, kv, config.num_speculative_tokens, config.max_num_batched_tokens)
