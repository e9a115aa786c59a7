"""What crosses the engine's border: requests in, token events out. All values are frozen.

They are msgspec structs, so that the engine process reads and writes them as msgpack without
a second set of wire types.
"""

from enum import StrEnum

import msgspec

from engine.errors import ErrorCode


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. `engine.validation.check_sampling` says what is allowed.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch those filters off. The
    repetition penalty counts prompt and output (as transformers does), presence and frequency
    count the output only (as OpenAI does).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `request_id` is for logs and need not be unique."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """What one step brought for one request.

    `stream_id` is the number under which the client submitted it. A token that ended the sequence
    (end of sequence, stop token) is the last of `token_ids`, with finish reason `stop`.
    """

    stream_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None


class RequestFailed(msgspec.Struct, frozen=True, array_like=True):
    """A request that ends in an error: refused at submit, or failed while running."""

    stream_id: int
    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step. Counters (`*_total`) only grow; times are seconds."""

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_free: int
    num_blocks_reserved: int
    steps_total: int
    runner_seconds_total: float
    overhead_seconds_total: float
    prompt_tokens_total: int
    generation_tokens_total: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the loaded engine is and what it holds; sent once, when it is ready to be asked."""

    runtime: str
    model_type: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    load_seconds: float
