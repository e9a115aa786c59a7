"""A request to a model, and its responses."""

from dataclasses import dataclass, field
from enum import IntFlag

from sluice.errors import SluiceError
from sluice.serving.tensors.tensor import Tensor

Parameter = bool | int | float | str
Parameters = dict[str, Parameter]

LATEST = -1
"""Version number of a request that names no version: the server serves it with the highest one that is ready."""


class SequenceFlag(IntFlag):
    """A request's position in its sequence; values are Triton's."""

    NONE = 0
    START = 1
    END = 2


@dataclass(slots=True)
class InferRequest:
    """One request to one model, in the terms of the v2 protocol. Owned by the job that it becomes.

    `inputs` are by name. Empty `requested_outputs` request all. `parameters` are the custom ones, without those that
    the protocol defines (below). `priority` 0 is the model's default, 1 the highest; `timeout_us` 0 is none. A request
    with `correlation_id` 0 or "" belongs to no sequence. `check_request` sets `batch_size`: the first dimension of its
    inputs where the model batches, else 1.
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
    """The metrics' label: v2_http, v2_grpc …"""
    tenant: str = ""
    """The tenant to whom an LLM's tokens are charged."""
    session: str = ""
    """The client's name of a session, whose requests go to one replica of an LLM; "" for its sequence, if any."""
    parent_session: str = ""
    """The client's name of the session that started this one; "" for none."""
    queue_timeout_us: int = 0
    """Longest wait for an LLM to admit the request; 0 is the engine's default."""
    batch_size: int = 1
    takes_stream: bool = False
    """Whether the caller takes any number of responses, also where the request does not ask for them."""
    streams_by_default: bool = False
    """Whether an LLM streams where the request leaves that open, as through generate_stream."""

    @property
    def log_prefix(self) -> str:
        """The words with which Triton begins messages about a request."""
        return f"[request id: {self.id or '<id_unknown>'}] "


@dataclass(slots=True)
class InferResponse:
    """One response. A decoupled model gives any number of them; the last one is final and may be empty.

    An `error` stands in place of outputs. Where it is not final, the stream goes on, as Triton's does.
    """

    outputs: list[Tensor] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    error: SluiceError | None = None
    is_final: bool = True
    id: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it only marks the end of the request. A response without outputs before the end is not empty."""
        return self.is_final and not self.outputs and self.error is None
