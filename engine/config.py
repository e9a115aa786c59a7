"""How an engine is set up: one frozen value, read once and passed in."""

import msgspec

from engine.errors import invalid


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits use vLLM's names. None means: chosen at load from the model and the machine."""

    model_path: str
    dtype: str = "auto"
    """Precision of the computation: auto (bf16 where the CPU has it), bf16, f32."""
    max_model_len: int | None = None
    """Longest prompt + output of one sequence, in tokens. Default: what the model was made for."""
    num_blocks: int | None = None
    """KV cache blocks. Raising it costs memory and lets more sequences run at once."""
    kv_cache_memory_bytes: int = 256 << 20
    """KV cache size where `num_blocks` is not given."""
    max_num_seqs: int = 64
    """Most sequences in one step. Raising it lengthens each step."""
    max_num_batched_tokens: int = 512
    """Most tokens in one step: decode first, then prefill chunks. Raising it speeds prefill, roughens decode."""
    max_queued_requests: int = 512
    """Most requests waiting to be admitted; one more is refused at once."""
    num_threads: int | None = None
    """Threads of the runtime. Default: one a core."""

    def __post_init__(self) -> None:
        """Raises SluiceError INVALID where decode alone could not fit into a step."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise invalid(
                "max_num_batched_tokens",
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"sequence gets its token in each step, got {self.max_num_batched_tokens}",
            )
