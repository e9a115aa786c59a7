"""What a protocol asks of a model, and what comes back."""

from dataclasses import dataclass, field
from enum import IntFlag

from serving.tensors.tensor import Tensor
from sluice.errors import SluiceError

Parameter = bool | int | float | str
Parameters = dict[str, Parameter]

LATEST = -1
"""The version of a request that leaves the choice to the server: the highest one that is ready."""


class SequenceFlag(IntFlag):
    """Where a request stands in its sequence; values are Triton's."""

    NONE = 0
    START = 1
    END = 2


@dataclass(slots=True)
class InferRequest:
    """One request to one model, in the words of the v2 protocol. Owned by the job that it becomes.

    `inputs` by name. `requested_outputs` empty asks for all. `parameters` are the custom ones: those that the protocol
    itself gives a meaning (below) are not among them. `priority` 0 is the model's default, 1 the highest;
    `timeout_us` 0 is none. `correlation_id` 0 or "" belongs to no sequence. `batch_size` is set by the check: the
    first dimension of its inputs where the model batches, else 1.
    """

    inputs: dict[str, Tensor]
    id: str = ""
    requested_outputs: tuple[str, ...] = ()
    parameters: Parameters = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    correlation_id: int | str = 0
    sequence: SequenceFlag = SequenceFlag.NONE
    protocol: str = "v2"
    """Its label in the metrics: v2_http, v2_grpc …"""
    tenant: str = ""
    """Whom an LLM's tokens are charged to."""
    queue_timeout_us: int = 0
    """Longest wait to be admitted by an LLM; 0 is what holds without it."""
    batch_size: int = 1
    streams_by_default: bool = False
    """Whether an LLM streams where the request does not say: generate_stream's name says it."""

    @property
    def log_prefix(self) -> str:
        """How Triton begins what it says of a request."""
        return f"[request id: {self.id or '<id_unknown>'}] "


@dataclass(slots=True)
class InferResponse:
    """One response. A decoupled model gives any number of them, and the last, which may be empty, is final.

    `error` in place of outputs fails this response; where it is not final, the stream goes on, as Triton's does.
    """

    outputs: list[Tensor] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    error: SluiceError | None = None
    is_final: bool = True
    id: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it only says that the request has ended. One without outputs before that is a response like any."""
        return self.is_final and not self.outputs and self.error is None
