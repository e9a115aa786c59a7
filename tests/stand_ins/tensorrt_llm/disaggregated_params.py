"""Parameters of prefill and decode on different machines."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ._stand_in.settings import settings

_KINDS = ("context_only", "generation_only", "context_and_generation")


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """Raises ValueError for an unknown `request_type`."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in _KINDS:
                raise ValueError(f"request_type must be one of {', '.join(_KINDS)}, got {self.request_type}")


if settings().version != "1.2.1":
    _Earlier = DisaggregatedParams

    @dataclass(slots=True, kw_only=True)
    class DisaggregatedParams(_Earlier):  # type: ignore[no-redef]
        """Later versions have an id for both servers, and tell how to come to the context server."""

        first_gen_log_probs: list[Any] | None = None
        first_gen_logits: list[Any] | None = None
        disagg_request_id: int | None = None
        ctx_dp_rank: int | None = None
        ctx_info_endpoint: str | None = None
        schedule_style: DisaggScheduleStyle | None = None
