"""The profile of a simulated replica: its limits, and what its steps cost. `sluice load --calibrate` writes one."""

from pathlib import Path

import msgspec

from sluice.engine.types import EngineInfo
from sluice.errors import SluiceError, invalid


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: the sum of these, each times what it is counted in. None is below 0."""

    step_s: float
    """Any step."""
    prefill_token_s: float
    """A token of a prompt that it computes."""
    decode_seq_s: float = 0.0
    """A sequence that it decodes."""
    context_token_s: float = 0.0
    """A token in the context of a sequence that it decodes."""
    attention_s: float = 0.0
    """A token of a prompt that it computes, times a token before it in its context."""

    def __post_init__(self) -> None:
        """Raise ValueError for a cost below 0, or where steps would take no time."""
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected seconds, at least 0")
        if self.step_s + self.decode_seq_s <= 0.0 or self.step_s + self.prefill_token_s <= 0.0:
            raise ValueError("step_s is 0 and so are prefill_token_s or decode_seq_s: such steps would take no time")

    def seconds(self, num_prefill: int, num_decode: int, num_context: int, attention: int) -> float:
        """Return the seconds of a step. `num_context` sums the contexts of the decoded sequences; `attention` sums, for
        each chunk of a prompt, its tokens times the tokens that precede the middle of the chunk."""
        return (
            self.step_s
            + self.prefill_token_s * num_prefill
            + self.decode_seq_s * num_decode
            + self.context_token_s * num_context
            + self.attention_s * attention
        )


class ReplicaProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica to simulate: limits as in `EngineConfig`, and costs."""

    costs: StepCosts
    name: str = ""
    """The model, for reports."""
    machine: str = ""
    """Where the costs were measured."""
    block_size: int = 32
    num_blocks: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    chooses_chunk: bool = True
    """Whether the engine chooses the tokens of a step by load, up to `max_num_batched_tokens`."""
    max_model_len: int = 32_768
    request_s: float = 0.0
    """Seconds that each request spends outside of the engine before its first token: HTTP, templates, tokenizing."""
    slowdown: float = 0.0
    """How much longer a step takes, as a part of its time, for each other replica that is in a step when it begins. 0
    where each replica has cores or GPUs of its own."""

    def __post_init__(self) -> None:
        """Raise ValueError for a limit out of its range."""
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; expected at least max_num_seqs, "
                f"{self.max_num_seqs}, so that each sequence gets its token in each step"
            )
        if self.request_s < 0.0:
            raise ValueError(f"request_s is {self.request_s}; expected seconds, at least 0")
        if self.slowdown < 0.0:
            raise ValueError(f"slowdown is {self.slowdown}; expected a part of a step's time, at least 0")

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of prompts in a second, at full chunks where nothing decodes."""
        tokens = self.max_num_batched_tokens
        return tokens / self.costs.seconds(tokens, 0, 0, 0)

    def engine_info(self) -> EngineInfo:
        """Return what the parts of the engine need to know."""
        return EngineInfo(
            runtime="simulated",
            model_type=self.name,
            dtype="",
            vocab_size=0,
            eos_token_ids=(),
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            load_seconds=0.0,
        )


def read_profile(path: Path) -> ReplicaProfile:
    """Read a profile from JSON. Raises SluiceError INVALID that names the file and the field at fault."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplicaProfile)
    except OSError as error:
        raise invalid("costs", f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _wrong(path, error) from None


def _wrong(path: Path, error: Exception) -> SluiceError:
    return invalid("costs", f"{path} is no profile of a replica: {error}")


def bundled_profile() -> ReplicaProfile:
    """Return the profile of the bundled model, measured on two CPU cores."""
    return read_profile(Path(__file__).with_name("rill.json"))
