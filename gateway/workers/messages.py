"""What host and workers say to each other: on the link of a worker, and on the connections of forwarded requests."""

import msgspec

from sluice.gateway.plane.live_requests import LiveRequest
from sluice.gateway.tenancy.quotas.account import Charge, Party
from sluice.pipelines.llm.sharing import SharedModel
from sluice.record.timelines import Timeline, TimelineOwner

Header = tuple[bytes, bytes]


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The head of a request, in ASGI's words. `names` are the headers' names as the client wrote them."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    http_version: str
    headers: list[Header]
    names: list[bytes]
    client: tuple[str, int] | None


class Start(msgspec.Struct, tag=True, frozen=True):
    """The head of an answer."""

    status: int
    headers: list[Header]


class Piece(msgspec.Struct, tag=True, frozen=True):
    """A part of a body, of the request or of the answer."""

    body: bytes
    is_last: bool


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The first message to a worker. `config` is its pickled ServeConfig, `socket` takes forwarded requests,
    `log_socket` the lines that it logs, "" for none."""

    number: int
    config: bytes
    socket: str
    log_socket: str = ""


class Served(msgspec.Struct, tag=True, frozen=True):
    """The language models that workers answer from now on; requests for all others are forwarded."""

    models: list[SharedModel]


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Take no more connections, and end when the open ones have; at once refuse new requests where the server ends."""

    refuses: bool


class AskCounts(msgspec.Struct, tag=True, frozen=True):
    """Ask a worker for its counts."""

    number: int


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One value of a family of metrics. `exemplar`: labels, value, and when it was, in seconds since 1970."""

    name: str
    labels: dict[str, str]
    value: float
    exemplar: tuple[dict[str, str], float, float] | None = None


class Family(msgspec.Struct, array_like=True, frozen=True):
    """A family of metrics, in Prometheus' words."""

    name: str
    help: str
    kind: str
    samples: list[Sample]


class Counts(msgspec.Struct, tag=True, frozen=True):
    """What a worker has counted since its start. It comes every second, and as the answer to `AskCounts`.

    `number` is 0 where nobody has asked.
    """

    number: int
    families: list[Family]


class AskRequests(msgspec.Struct, tag=True, frozen=True):
    """Ask a worker for its open generations. Those of the id `cancel` end first, where it is not empty."""

    number: int
    cancel: str = ""


class Requests(msgspec.Struct, tag=True, frozen=True):
    """The answer to `AskRequests`: the open generations, and how many were cancelled."""

    number: int
    open: list[LiveRequest]
    num_cancelled: int


class AskTimelines(msgspec.Struct, tag=True, frozen=True):
    """Ask a worker for its timelines of a request id, or all for "", that `owner` may see; None sees all."""

    number: int
    request_id: str
    owner: TimelineOwner | None


class FoundTimelines(msgspec.Struct, tag=True, frozen=True):
    """The answer to `AskTimelines`."""

    number: int
    timelines: list[Timeline]


class Linked(msgspec.Struct, tag=True, frozen=True):
    """The models that a worker uses, by id, and those to whose engine it attaches now. It uses no others any more."""

    ids: list[str]
    attaching: list[str]


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Ask the host to reserve a charge of all parties. `hold` is what the same request holds already, 0 for nothing."""

    number: int
    parties: list[Party]
    charge: Charge
    hold: int


class AccountState(msgspec.Struct, array_like=True, frozen=True):
    """The numbers of an account."""

    at: int
    request_level: int
    token_level: int
    day: int
    day_tokens: int
    month: int
    month_tokens: int
    month_money: int
    num_streams: int


class Refused(msgspec.Struct, frozen=True):
    """Why nothing was reserved: the fields of `Refusal`, with the place of the party among those that were sent."""

    party: int
    limit: str
    most: int
    asked: int
    left: int
    wait_ms: float | None


class Decision(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Reserve`: the number of a hold, 0 with a refusal; and the parties' accounts now."""

    number: int
    hold: int
    is_new: bool
    """Whether the request held nothing before."""
    refused: Refused | None
    accounts: list[AccountState]


class Settle(msgspec.Struct, tag=True, frozen=True):
    """Replace a hold by what was used, tokens as each account counts them."""

    hold: int
    tokens: list[int]
    money: int


ToWorker = Welcome | Served | Drain | AskCounts | AskRequests | AskTimelines | Decision
ToHost = Counts | Requests | FoundTimelines | Linked | Reserve | Settle
OfRequest = Begin | Piece
OfAnswer = Start | Piece
