"""Calls: the requests of clients from the guard of their protocol to their end, with what they used.

The task of a request and its child tasks find their call in `current_call`, so no protocol passes it on. Calls are made
only where somebody observes them.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter, time

from sluice.errors import SluiceError
from sluice.gateway.tenancy.access.control import AccessControl, Credentials
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.rights import check_model, choose_priority, may_use
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.pipelines.text.sessions import MAX_NAME_CHARS

OpenStreams = dict[Callable[[SluiceError], None], Identity]
"""Open streams: the function that ends each, and the identity that sent it."""
CACHED = "cached"
"""How a call ends whose answer was kept, instead of a finish reason."""
BATCH = "batch"
"""The protocol of calls that the server makes itself, for batches."""
Headers = list[tuple[bytes, bytes]]


class CallObserver:
    """Follows calls, on the event loop. Each method is called for every call, in the order of the observers.

    What an observer keeps of a call is its own, by the call. The methods here do nothing.
    """

    async def begin(self, call: "Call") -> None:
        """Note a call whose sender is known, before any work for it. Raises SluiceError to refuse it."""

    async def admit(self, call: "Call", prompt_tokens: int, max_tokens: int) -> None:
        """Note a generation of at most `max_tokens` before it is submitted. Raises SluiceError to refuse it.

        A call may have several generations, each of which is admitted once.
        """

    def leave(self, call: "Call", prompt_tokens: int, max_tokens: int) -> None:
        """Note that an admitted generation, of a target of a route, gives no answer: the next takes its place."""

    def answer_headers(self, call: "Call") -> Headers:
        """Return more headers for the HTTP answer of a call, which starts now."""
        return []

    def end(self, call: "Call") -> None:
        """Note the end of a call, exactly once, also of one that was refused or never began. Must not raise."""


@dataclass(slots=True, eq=False)
class Call:
    """One request of a client. Belongs to the event loop.

    Times are perf_counter seconds, 0 for not yet; `arrived_at` is in seconds since 1970. Tokens are the sums over all
    generations of the call; a prompt that several of them continue counts once. The call ends when everybody who holds
    it has released it: its guard, which holds it from the start, and each generation, because some outlive their
    request.
    """

    _observers: tuple[CallObserver, ...]
    protocol: str
    operation: str
    """The path or RPC that was called."""
    request_id: str
    source: str = ""
    """The client's address, "" where it has none."""
    streams: OpenStreams = field(default_factory=dict)
    """Where its log has the streams that end when their sender's key does."""
    identity: Identity | None = None
    """The request's authenticated identity; None when the server has no keys."""
    tenant: str = ""
    group: RouteGroup | None = None
    """The routes it belongs to, where it makes a model work; None for other requests."""
    model: str = ""
    adapter: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """How many of the prompts' tokens a prefix cache had."""
    generated_tokens: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    """Bytes of the bodies of request and answer, or of gRPC's messages."""
    on_body: Callable[[bytes, bool], None] | None = None
    """Called with each piece of its HTTP bodies, and whether that is one of the answer; None: nobody reads them."""
    arrived_at: float = field(init=False, default_factory=time)
    started: float = field(init=False, default_factory=perf_counter)
    first_token: float = 0.0
    ended: float = 0.0
    finish: str = ""
    """The last generation's finish reason, `cancelled`, or the code of the error that ended it; "" before it."""
    status: int | None = None
    """The HTTP status, or the number of gRPC's; None before an answer, and where the client got none."""
    route: str = ""
    """The route that it names in place of a model; its target is the `model`, "" without one."""
    session: str = ""
    parent_session: str = ""
    """The client's names of its session and of the one that started that; "" for none."""
    _num_holders: int = 1

    def sibling(self, request_id: str) -> "Call":
        """Return a new call of the same sender: the next request on its stream."""
        call = Call(self._observers, self.protocol, self.operation, request_id, self.source)
        call.identity, call.tenant, call.group = self.identity, self.tenant, self.group
        return call

    async def begin(self) -> None:
        """Tell the observers. Raises SluiceError where one refuses the call."""
        for each in self._observers:
            await each.begin(self)

    async def admit(self, prompt_tokens: int, max_tokens: int) -> None:
        """Tell the observers of a generation. Raises SluiceError where one refuses it."""
        for each in self._observers:
            await each.admit(self, prompt_tokens, max_tokens)

    def leave(self, prompt_tokens: int, max_tokens: int) -> None:
        """Tell the observers of a generation that another one takes the place of."""
        for each in self._observers:
            each.leave(self, prompt_tokens, max_tokens)

    def answer_headers(self) -> Headers:
        """Return the observers' headers for its HTTP answer, which starts now."""
        return [header for each in self._observers for header in each.answer_headers(self)]

    def note_received(self, piece: bytes) -> None:
        """Note a piece of its HTTP body."""
        self.bytes_in += len(piece)
        if self.on_body is not None:
            self.on_body(piece, False)

    def note_sent(self, piece: bytes) -> None:
        """Note a piece of its HTTP answer."""
        self.bytes_out += len(piece)
        if self.on_body is not None:
            self.on_body(piece, True)

    def hold(self) -> None:
        """Keep the call from ending until `release`."""
        self._num_holders += 1

    def release(self) -> None:
        """End the call where nobody else holds it."""
        self._num_holders -= 1
        if self._num_holders == 0 and not self.ended:
            self.ended = perf_counter()
            for each in self._observers:
                each.end(self)


class CallLog:
    """Opens the calls of one server, for its observers, and finds out who sends them."""

    def __init__(self, access: AccessControl | None = None) -> None:
        """`access` None: nobody is asked who he is."""
        self.access = access or AccessControl(KeyRing(None))
        self.access.ring.on_change = self._update
        self.access.ring.on_look = self._end_refused
        self.is_active = False
        """Whether calls are opened: somebody observes them, or senders have rights."""
        self.asks_for_keys = False
        """Whether requests need a key. As `AccessControl.is_enforced`, in a file that every request runs anyway."""
        self._observers: tuple[CallObserver, ...] = ()
        self._streams: OpenStreams = {}
        self._has_curious = False
        """Whether an observer wants calls of unknown senders, too."""
        self._update()

    def observe(self, observer: CallObserver, *, only_known: bool = False) -> None:
        """Have calls that open from now on observed. The first observer is asked first and told first.

        With `only_known`, calls are not opened for this observer's sake while senders need no key.
        """
        self._observers = (*self._observers, observer)
        self._has_curious |= not only_known
        self._update()

    def _update(self) -> None:
        self.asks_for_keys = self.access.is_enforced
        self.is_active = self._has_curious or self.access.is_active

    def _end_refused(self) -> None:
        """End the streams whose senders' keys are revoked or have expired since they began."""
        for end, identity in list(self._streams.items()):
            try:
                self.access.resume(identity, None)
            except SluiceError as refusal:
                del self._streams[end]
                end(refusal)

    def open(self, protocol: str, operation: str, request_id: str, *, is_observed: bool = True) -> Call:
        """Open a call, and make it the current one of this task."""
        observers = self._observers if is_observed else ()
        call = Call(observers, protocol, operation, request_id, "", self._streams)
        current_call.set(call)
        return call

    async def identify(self, call: Call, sent: Credentials, group: RouteGroup | None) -> None:
        """Find out who sends a call to a group of routes. Raises as `AccessControl.identify`."""
        call.source = sent.peer
        call.identity, call.tenant, call.source = await self.access.identify(sent, group)


NO_RETRY = (b"x-should-retry", b"false")
"""The header of an answer that another try would get again. OpenAI's clients obey it, which try a 429 again else."""
current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
"""The call that this task works for; None where calls are not observed."""


@contextmanager
def hold_call() -> Iterator[None]:
    """Keep the current call, where there is one, from ending before the end of the context, which starts within it."""
    call = current_call.get()
    if call is None:
        yield
        return
    call.hold()
    try:
        yield
    finally:
        call.release()


@contextmanager
def ending_with_key() -> Iterator[None]:
    """End the context, which streams an answer in this task, once the key of the current call is revoked or expires.

    Raises UNAUTHENTICATED then, in the place of whatever is awaited.
    """
    call, task = current_call.get(), asyncio.current_task()
    if call is None or call.identity is None or task is None:
        yield
        return
    refusals: list[SluiceError] = []

    def end(refusal: SluiceError) -> None:
        refusals.append(refusal)
        task.cancel()

    call.streams[end] = call.identity
    try:
        yield
    except asyncio.CancelledError:
        if not refusals or task.uncancel() > 0:
            raise
        raise refusals[0] from None
    finally:
        call.streams.pop(end, None)


def note_model(name: str, adapter: str = "", *, is_checked: bool = True) -> None:
    """Note in the current call, where there is one, which model and adapter it is for.

    Raises FORBIDDEN where its sender may not use them, unless that is to be checked later.
    """
    call = current_call.get()
    if call is not None:
        call.model, call.adapter = name, adapter
        if is_checked and call.identity is not None:
            check_model(call.identity, name, adapter)


def note_route(name: str) -> None:
    """Note in the current call, where there is one, that it names a route. Raises FORBIDDEN where its sender may not
    use it; the targets are the route's own choice."""
    call = current_call.get()
    if call is not None:
        call.route = name
    note_model(name)


def note_session(name: str, parent: str) -> None:
    """Note in the current call, where there is one, the names of its session and of that one's parent, "" for none."""
    call = current_call.get()
    if call is not None and name:
        call.session, call.parent_session = name[:MAX_NAME_CHARS], parent[:MAX_NAME_CHARS]


def note_cached() -> None:
    """Note in the current call that a cache answered."""
    call = current_call.get()
    if call is not None:
        call.finish = CACHED
        call.first_token = call.first_token or perf_counter()


def note_prompt(num_tokens: int) -> None:
    """Add the tokens of texts that were encoded, not continued, to the current call."""
    call = current_call.get()
    if call is not None and call.finish != CACHED:
        call.prompt_tokens += num_tokens


async def admit_prompt(num_tokens: int) -> None:
    """Ask whether so many tokens of texts may be encoded for the current call. Raises SluiceError where not."""
    call = current_call.get()
    if call is not None:
        await call.admit(num_tokens, 0)


def keeps_answers() -> bool:
    """Whether the sender of the current call wants answers to be kept for equal requests."""
    identity = current_identity()
    return identity is not None and identity.caches


def answer_scope() -> str:
    """Return whose answers may answer the current call: those of its tenant, or of its key where it has no tenant."""
    call = current_call.get()
    if call is None or (not call.tenant and call.identity is None):
        return ""
    return f"tenant:{call.tenant}" if call.tenant or call.identity is None else f"key:{call.identity.key_id}"


def current_identity() -> Identity | None:
    """Return who sent the current call; None where nobody is asked."""
    call = current_call.get()
    return None if call is None else call.identity


def allowed_priority(priority: int | None) -> int:
    """Return the priority of a request that asks for one, or for none.

    Raises INVALID for one outside the range of its sender. Those of batches are the server's own choice.
    """
    call = current_call.get()
    if call is None or call.identity is None or call.protocol == BATCH:
        return priority or 0
    return choose_priority(call.identity, priority)


def is_visible(model: str, adapter: str = "") -> bool:
    """Whether the sender of the current call may use a model, and so see it in a list."""
    identity = current_identity()
    return identity is None or may_use(identity, model, adapter)
