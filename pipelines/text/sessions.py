"""A server's sessions: what each has used, and why the beginning of a prompt was computed again.

Of a session's last prompt only digests are kept, 8 bytes for each message, tool and block of tokens. They are Python's
own hashes, whose key is new in each process: quick to make, and of no use outside of it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import eq
from time import time
from typing import TypeAlias

import msgspec

from sluice.engine.types import EventDetail, Eviction
from sluice.pipelines.text.types import (
    CacheMiss,
    CacheMissReason,
    ChatMessage,
    Conversation,
    EncodedPrompt,
    PlainPrompt,
    TemplateOptions,
    TextRequest,
)

MAX_SESSIONS = 16_384
MAX_DIGEST_BYTES = 32 << 20
"""Bytes of digests of all sessions. Beyond either bound those are forgotten that have sent nothing for longest."""
MAX_LISTED = 100
"""Sessions that are shown to those who watch a server."""
MAX_NAME_CHARS = 200
"""Longest name of a session that is written down; what follows is left out."""
CHUNK_CHARS = 64
"""Characters of a text that have a digest of their own."""
_MAX_CHUNKS = 4096
_MAX_ARGUMENTS, _MAX_ARGUMENT_CHARS = 64, 64
_MAX_VALUES = 8192
"""Values within the arguments of a template that have a digest; one that would exceed this has none."""
_MAX_TURNS = 64
_DIGEST_BYTES, _TURN_BYTES = 8, 120
_SYSTEM_ROLES = ("system", "developer")
Digests: TypeAlias = "array[int]"
_MISSES = {
    CacheMissReason.FIRST_REQUEST: "no earlier request of the session is known here",
    CacheMissReason.MODEL_CHANGED: "the session's last request was for model '{before}'",
    CacheMissReason.ADAPTER_CHANGED: "the session's last request was for adapter '{before}'",
    CacheMissReason.CACHE_SALT_CHANGED: "the session's last request had another cache_salt",
    CacheMissReason.TEMPLATE_CHANGED: "{at} changed",
    CacheMissReason.TOOLS_CHANGED: "{at} changed",
    CacheMissReason.SYSTEM_CHANGED: "the system message changed at character {character} or within 64 after it",
    CacheMissReason.MESSAGES_CHANGED: "{at} differs",
    CacheMissReason.PROMPT_CHANGED: "the prompt changed at character {character} or within 64 after it",
    CacheMissReason.RENDERING_CHANGED: "the chat template writes a part of the last prompt in another way",
    CacheMissReason.EVICTED: "evicted {evicted_s:.1f} s ago, for {evicted_for}",
    CacheMissReason.ANOTHER_REPLICA: "the session's last request went to replica '{before}'",
    CacheMissReason.NOT_IN_CACHE: "the cache does not have them any more",
    CacheMissReason.NOT_LOOKED_UP: "prompt_logprobs need the whole prompt computed",
}
"""Sentences about the tokens that were computed again, or what of it the fields of a `CacheMiss` fill in."""
_TOKENS_CHANGED = "the prompt changed at token {token}"
FindReplica = Callable[[], str]
"""Returns the replica that has got a request; "" for a model with one engine."""


@dataclass(slots=True, eq=False)
class PromptDigest:
    """One prompt of a session. `text` are chunks of a prompt that is a text, or of a conversation's system message."""

    model: str
    adapter: str
    salt: int
    kind: type
    has_system: bool
    options: dict[str, int]
    """The digests of the values that the chat template is rendered with, by the client's names."""
    tools: Digests
    messages: Digests
    text: Digests
    blocks: Digests
    num_tokens: int
    turns: list[tuple[int, int]]
    """The numbers of messages and tokens of the session's prompts whose tokens all stand in this one."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the digests."""
        parts = (self.tools, self.messages, self.text, self.blocks)
        return _DIGEST_BYTES * sum(map(len, parts)) + _TURN_BYTES * (len(self.turns) + len(self.options))


@dataclass(slots=True, eq=False)
class SessionUse:
    """What a session has used. Tokens are sums over its requests; `seen_at` is in seconds since 1970."""

    key: str
    name: str
    parent: str
    tenant: str
    model: str = ""
    num_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    missed_tokens: int = 0
    """Tokens of prompts that stood in the session's prompt before, and were computed again."""
    seen_at: float = field(default_factory=time)
    miss: CacheMiss | None = None
    """Why tokens were computed again, of the last request of which some were."""
    prompt: PromptDigest | None = None
    replica: str = ""
    """The replica that had the last request; "" for a model with one engine."""

    def add(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> None:
        """Count a generation that has ended."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.generated_tokens += generated_tokens
        self.seen_at = time()


class SessionRow(msgspec.Struct, frozen=True):
    """A session as others see it. `missed_tokens` are those of its prompts that were computed again, and `miss` says
    why, of the last request of which some were; "" for none."""

    name: str
    parent: str
    tenant: str
    model: str
    num_turns: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    missed_tokens: int
    miss: str
    seen_s: float
    """Seconds since its last request came or ended."""


class SessionTable:
    """The sessions that a process knows. Belongs to the event loop."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_digest_bytes: int = MAX_DIGEST_BYTES) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_digest_bytes
        self._num_bytes = 0
        self._uses: OrderedDict[str, SessionUse] = OrderedDict()
        """By key, the one that has been silent for longest first."""

    def __len__(self) -> int:
        return len(self._uses)

    def find(self, key: str) -> SessionUse | None:
        """Return the session of a key, where it is known."""
        return self._uses.get(key)

    def latest(self, most: int) -> list[SessionUse]:
        """Return the sessions that sent a request last, the latest one first."""
        return list(islice(reversed(self._uses.values()), most))

    def rows(self, most: int = MAX_LISTED, now: float | None = None) -> list[SessionRow]:
        """Return rows of the sessions that sent a request last. `now` is in seconds since 1970, None: now."""
        now = time() if now is None else now
        return [
            SessionRow(
                name=use.name,
                parent=use.parent,
                tenant=use.tenant,
                model=use.model,
                num_turns=use.num_turns,
                prompt_tokens=use.prompt_tokens,
                cached_tokens=use.cached_tokens,
                generated_tokens=use.generated_tokens,
                missed_tokens=use.missed_tokens,
                miss="" if use.miss is None else describe_miss(use.miss),
                seen_s=round(max(now - use.seen_at, 0.0), 3),
            )
            for use in self.latest(most)
        ]

    def open(self, key: str, request: TextRequest, model: str) -> SessionUse:
        """Return the session of a request that has just come, which is a turn of it. `key` tells sessions apart."""
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = SessionUse(key, request.session[:MAX_NAME_CHARS], "", request.tenant)
            self._forget()
        else:
            self._uses.move_to_end(key)
        use.model, use.seen_at = model, time()
        use.parent = request.parent_session[:MAX_NAME_CHARS] or use.parent
        use.num_turns += 1
        return use

    def keep(self, use: SessionUse, prompt: PromptDigest, size_before: int) -> None:
        """Keep the prompt as the session's last one. `size_before` are the bytes of the one that it takes the place of,
        which it may have grown from."""
        if self._uses.get(use.key) is use:
            self._num_bytes += prompt.size_bytes - size_before
            use.prompt = prompt
            self._forget()

    def _forget(self) -> None:
        while len(self._uses) > self._max_sessions or (self._num_bytes > self._max_bytes and len(self._uses) > 1):
            _, use = self._uses.popitem(last=False)
            self._num_bytes -= 0 if use.prompt is None else use.prompt.size_bytes
            use.prompt = None


class PromptWatch:
    """Finds out, once a prompt's first token is there, why the prompt was not in the cache as far as it could be."""

    __slots__ = ("_block_size", "_find_replica", "_model", "_prompt", "_request", "_table", "use")

    def __init__(
        self,
        table: SessionTable,
        use: SessionUse,
        request: TextRequest,
        prompt: EncodedPrompt,
        model: str,
        block_size: int,
        find_replica: FindReplica,
    ) -> None:
        self.use = use
        self._table = table
        self._request = request
        self._prompt = prompt
        self._model = model
        self._block_size = block_size
        self._find_replica = find_replica

    def explain(self, detail: EventDetail) -> CacheMiss | None:
        """Return why tokens were computed that could have been in the cache; None where none were. `detail` is of the
        engine's events; the one that counts the cached tokens decides. The prompt is then the session's last one."""
        num_cached, use = detail.num_cached_tokens, self.use
        if num_cached is None or self._prompt.images:  # what of an image is cached cannot be told from its placeholder
            return None
        last, replica = use.prompt, self._find_replica()
        size_before, replica_before, use.replica = 0 if last is None else last.size_bytes, use.replica, replica
        num_reusable = self._num_reusable(last)
        if last is not None and num_cached >= num_reusable and self._extend(last):
            self._table.keep(use, last, size_before)
            return None
        new = self._digest()
        miss = None
        if num_cached < num_reusable:
            miss = self._find_cause(last, new, num_cached, num_reusable, detail.evicted, replica_before)
            use.miss = miss
            use.missed_tokens += 0 if last is None else miss.missed_tokens
        self._table.keep(use, new, size_before)
        return miss

    def _num_reusable(self, last: PromptDigest | None) -> int:
        """Return how many tokens could be in the cache: whole blocks of the last prompt's, all but the last token."""
        most = len(self._prompt.token_ids) - 1
        return (most if last is None else min(most, last.num_tokens)) // self._block_size * self._block_size

    # -- digests

    def _digest(self) -> PromptDigest:
        sent, request = self._prompt.source, self._request
        is_chat = isinstance(sent, Conversation)
        messages = sent.messages if isinstance(sent, Conversation) else ()
        options = sent.options if isinstance(sent, Conversation) else None
        new = PromptDigest(
            model=self._model,
            adapter=request.adapter,
            salt=hash(request.cache_salt),
            kind=type(sent),
            has_system=_has_system(messages),
            options={} if options is None else _digest_options(options),
            tools=array("q", () if options is None else map(_digest_json, options.tools)),
            messages=array("q", map(hash, messages)),
            text=array("q"),
            blocks=array("q"),
            num_tokens=0,
            turns=[],
        )
        if not is_chat or new.has_system:
            _extend_text(new.text, _text_of(sent))
        self._take_tokens(new)
        return new

    def _extend(self, last: PromptDigest) -> bool:
        """Make the digest of a prompt of which this one is a continuation that of this one. Returns False, and leaves
        it, where it may be none: the cache has shown that the tokens are the same, and the number of messages and tools
        is looked at, but no message is read twice."""
        sent, request = self._prompt.source, self._request
        is_of_one = (last.model, last.adapter, last.salt) == (self._model, request.adapter, hash(request.cache_salt))
        if not is_of_one or last.kind is not type(sent) or len(self._prompt.token_ids) < last.num_tokens:
            return False
        if isinstance(sent, Conversation):
            known = len(last.messages)
            if len(sent.messages) < known or len(sent.options.tools) != len(last.tools):
                return False
            last.options = _digest_options(sent.options)
            last.messages.extend(map(hash, sent.messages[known:]))
        else:
            _extend_text(last.text, _text_of(sent))
        self._take_tokens(last)
        return True

    def _take_tokens(self, digest: PromptDigest) -> None:
        """Add the blocks that the digest lacks, and note the turn."""
        token_ids, size = self._prompt.token_ids, self._block_size
        begins = range(len(digest.blocks) * size, len(token_ids) // size * size, size)
        digest.blocks.extend([hash(tuple(token_ids[begin : begin + size])) for begin in begins])
        digest.num_tokens = len(token_ids)
        digest.turns = [*digest.turns[1 - _MAX_TURNS :], (len(digest.messages), digest.num_tokens)]

    # -- causes

    def _find_cause(
        self,
        last: PromptDigest | None,
        new: PromptDigest,
        num_cached: int,
        num_reusable: int,
        evicted: Eviction | None,
        replica_before: str,
    ) -> CacheMiss:
        """Return the cause that comes first in the prompt: a block that the cache has lost, or one that is another."""
        missed = num_reusable - num_cached
        if self._request.sampling.get("prompt_logprobs") is not None:
            return CacheMiss(CacheMissReason.NOT_LOOKED_UP, missed, num_cached)
        if last is None:
            return CacheMiss(CacheMissReason.FIRST_REQUEST, missed, num_cached)
        if last.model != new.model:
            return CacheMiss(CacheMissReason.MODEL_CHANGED, missed, num_cached, before=last.model)
        if last.adapter != new.adapter:
            return CacheMiss(CacheMissReason.ADAPTER_CHANGED, missed, num_cached, before=last.adapter)
        if last.salt != new.salt:
            return CacheMiss(CacheMissReason.CACHE_SALT_CHANGED, missed, num_cached)
        num_same = _num_common(last.blocks, new.blocks) * self._block_size
        if num_cached >= num_same:
            new.turns[:0] = [turn for turn in last.turns if turn[1] <= num_same]
            return _find_change(last, new, missed, num_cached)
        if replica_before != self.use.replica:
            return CacheMiss(CacheMissReason.ANOTHER_REPLICA, missed, num_cached, before=replica_before)
        if evicted is None:
            return CacheMiss(CacheMissReason.NOT_IN_CACHE, missed, num_cached)
        whose = self._name_of(evicted)
        age_s = round(evicted.age_s, 3)
        return CacheMiss(CacheMissReason.EVICTED, missed, num_cached, evicted_s=age_s, evicted_for=whose)

    def _name_of(self, evicted: Eviction) -> str:
        """Return for whom a block was evicted, without the names of others' sessions."""
        if evicted.tenant != self._request.tenant:
            return "another tenant"
        known = self._table.find(evicted.session)
        if known is self.use:
            return "this session"
        return "a request without a session" if not evicted.session else known.name if known else "another session"


def _find_change(last: PromptDigest, new: PromptDigest, missed: int, num_cached: int) -> CacheMiss:
    """Return what is another in the new prompt, in the order in which templates write: options, tools, messages."""
    names = [name for name in {**last.options, **new.options} if last.options.get(name) != new.options.get(name)]
    if names:
        return CacheMiss(CacheMissReason.TEMPLATE_CHANGED, missed, num_cached, at=names[0])
    if last.tools != new.tools:
        at = f"tools[{_num_common(last.tools, new.tools)}]"
        return CacheMiss(CacheMissReason.TOOLS_CHANGED, missed, num_cached, at=at)
    if last.kind is not new.kind or not new.messages:
        character = CHUNK_CHARS * _num_common(last.text, new.text) if new.text else None
        return CacheMiss(CacheMissReason.PROMPT_CHANGED, missed, num_cached, at="prompt", character=character)
    # Messages before those of a turn whose tokens are all the same are rendered as they were, whatever is in them.
    first = new.turns[-2][0] if len(new.turns) > 1 else 0
    changed = first + _num_common(last.messages[first:], new.messages[first:])
    if changed == 0 and (last.has_system or new.has_system):
        character = CHUNK_CHARS * _num_common(last.text, new.text)
        return CacheMiss(CacheMissReason.SYSTEM_CHANGED, missed, num_cached, at="messages[0]", character=character)
    if changed < len(last.messages):
        return CacheMiss(CacheMissReason.MESSAGES_CHANGED, missed, num_cached, at=f"messages[{changed}]")
    return CacheMiss(CacheMissReason.RENDERING_CHANGED, missed, num_cached)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many digests two sequences have in common at their beginnings."""
    if one[: len(other)] == other[: len(one)]:  # as a rule
        return min(len(one), len(other))
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def _has_system(messages: Sequence[ChatMessage]) -> bool:
    return bool(messages) and messages[0].role in _SYSTEM_ROLES


def _text_of(sent: PlainPrompt) -> str:
    """Return the text that is looked at by characters."""
    if isinstance(sent, Conversation):
        return sent.messages[0].content
    return sent if isinstance(sent, str) else ""


def _extend_text(digests: Digests, text: str) -> None:
    """Add the digests of the text's chunks that are not there yet."""
    most = min(len(text) // CHUNK_CHARS, _MAX_CHUNKS)
    begins = range(len(digests) * CHUNK_CHARS, most * CHUNK_CHARS, CHUNK_CHARS)
    digests.extend([hash(text[begin : begin + CHUNK_CHARS]) for begin in begins])


def _digest_options(options: TemplateOptions) -> dict[str, int]:
    """Return digests of the options that are not the usual ones. Those of the prompt's very end are left out."""
    if options.template is None and not options.documents and not options.arguments:  # as a rule
        return {}
    found = {} if options.template is None else {"chat_template": hash(options.template)}
    values: dict[str, object] = {"documents": options.documents} if options.documents else {}
    for name, value in islice(options.arguments.items(), _MAX_ARGUMENTS):
        values[f"chat_template_kwargs.{name[:_MAX_ARGUMENT_CHARS]}"] = value
    left = _MAX_VALUES
    for name, value in values.items():
        found[name] = 0
        if (size := _size(value, left)) <= left:
            left -= size
            found[name] = _digest_json(value)
    return found


def _digest_json(value: object) -> int:
    """Return the digest of what came as JSON, in which numbers may be larger than JSON's encoder takes."""
    try:
        return hash(msgspec.json.encode(value))
    except (ValueError, OverflowError, RecursionError):
        with suppress(RecursionError):
            return hash(repr(value))
        return 0


def _size(value: object, most: int) -> int:
    """Return how many values there are within what came as JSON, 64 characters of a text counting for one; more than
    `most` where there are more. A template may take no notice of them, so that no context limits them."""
    pending, size = [value], 0
    while pending and size <= most:
        each = pending.pop()
        size += 1 + (len(each) // CHUNK_CHARS if isinstance(each, str) else 0)
        if isinstance(each, dict | list | tuple) and size + len(each) <= most:
            pending.extend(each.values() if isinstance(each, dict) else each)
        elif isinstance(each, dict | list | tuple):
            size += len(each)
    return size


def describe_miss(miss: CacheMiss) -> str:
    """Return a sentence about why tokens were computed again."""
    is_of_tokens = miss.reason is CacheMissReason.PROMPT_CHANGED and miss.character is None
    text = _TOKENS_CHANGED if is_of_tokens else _MISSES[miss.reason]
    return text.format(**{name: getattr(miss, name) for name in miss.__struct_fields__})


def merge_rows(rows: Iterable[SessionRow], most: int) -> list[SessionRow]:
    """Return the latest of the rows of several processes, those of one session as one: their sums, and what the process
    that had its last request says."""
    found: dict[tuple[str, str], SessionRow] = {}
    for row in sorted(rows, key=lambda each: each.seen_s):
        key = row.tenant, row.name
        last = found.get(key)
        if last is not None:
            sums = {name: getattr(last, name) + getattr(row, name) for name in _COUNTS}
            row = msgspec.structs.replace(last, **sums, parent=last.parent or row.parent, miss=last.miss or row.miss)
        found[key] = row
    return list(islice(found.values(), most))


_COUNTS = ("num_turns", "prompt_tokens", "cached_tokens", "generated_tokens", "missed_tokens")
