"""Decisions after an engine is lost: which requests caused it, in which order the others go to the next engine, and
which LoRA adapters that must have. Nothing here does I/O or reads a clock; `engine/client/process.py` acts on it."""

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from sluice.engine.config import EngineConfig
from sluice.engine.frames import AdapterOutcome, LoadAdapter
from sluice.engine.types import EngineInfo, GenerateRequest
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

Clock = Callable[[], float]
MAX_SHARED_CRASHES = 5
"""A request fails after this many crashes during its run, even if none of them can be attributed to a request."""


@dataclass(slots=True)
class RecoveryCounts:
    """Counts of what became of lost engines and of their requests."""

    num_restarts: int = 0
    """Engines started in place of a lost one."""
    seconds_total: float = 0.0
    last_s: float = 0.0
    """Seconds from the detection of a loss until the new engine was ready."""
    num_resumed: int = 0
    """Requests that were sent to a new engine, to continue where the lost one had stopped."""
    num_poisoned: int = 0
    """Requests that failed because the engine crashed on them repeatedly."""

    def note(self, recovery_s: float) -> None:
        """Count a new engine, which was ready `recovery_s` after the loss was detected."""
        self.num_restarts += 1
        self.last_s = recovery_s
        self.seconds_total += recovery_s

    def __add__(self, other: "RecoveryCounts") -> "RecoveryCounts":
        """Return the sums, with the longer of the last recoveries."""
        return RecoveryCounts(
            self.num_restarts + other.num_restarts,
            self.seconds_total + other.seconds_total,
            max(self.last_s, other.last_s),
            self.num_resumed + other.num_resumed,
            self.num_poisoned + other.num_poisoned,
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """The history of a stream that moves to another engine: whether it is new to all engines, whether it may have
    crashed the one that it leaves, and how many crashes it was suspected of and was running in."""

    is_new: bool = False
    is_suspect: bool = False
    num_suspected: int = 0
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class AbandonedStreams:
    """Streams that are not retried: `poisonous` ones crashed the engine, `exhausted` ones ran in too many crashes."""

    poisonous: tuple[int, ...] = ()
    exhausted: tuple[int, ...] = ()


class RecoveryQueue:
    """The streams in the engine and those that wait for it, by stream id.

    A stream is unproven from when it is sent until it brings a token. If the engine crashes, the unproven streams are
    its suspects, and all others are innocent. The next engine gets the innocent streams at once, and the suspects one
    by one, each when the one before has proven itself, so that a second crash points at exactly one of them. The engine
    gives turns for such probes, one at a time over all its clients; a probe without a turn is not blamed. Requests that
    come meanwhile wait behind them. `take_due` says which streams to send now.
    """

    def __init__(self) -> None:
        self._is_up = True
        self._sent: dict[int, None] = {}
        self.unproven: dict[int, None] = {}
        """Streams that were sent and have not brought a token since."""
        self._innocent: dict[int, None] = {}
        self._suspect: dict[int, None] = {}
        self._new: dict[int, None] = {}
        self._is_probing = False
        self.probe: int | None = None
        """The suspect that was sent and has not proven itself."""
        self._num_suspected: dict[int, int] = {}
        self._num_shared: dict[int, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether a new request goes straight to the engine."""
        return self._is_up and not self._is_probing

    def is_sent(self, stream_id: int) -> bool:
        return stream_id in self._sent

    def add(self, stream_id: int) -> None:
        """Queue a new stream."""
        self._new[stream_id] = None

    def release(self, stream_id: int) -> Standing:
        """Forget a stream, which goes on in another engine."""
        standing = Standing(
            is_new=stream_id in self._new,
            is_suspect=stream_id in self._suspect,
            num_suspected=self._num_suspected.get(stream_id, 0),
            num_shared=self._num_shared.get(stream_id, 0),
        )
        self.remove(stream_id)
        return standing

    def adopt(self, stream_id: int, standing: Standing) -> None:
        """Queue a stream of another engine. Suspects are probed here as those of an engine that was lost here."""
        if standing.num_suspected:
            self._num_suspected[stream_id] = standing.num_suspected
        if standing.num_shared:
            self._num_shared[stream_id] = standing.num_shared
        if standing.is_suspect:
            self._suspect[stream_id] = None
            self._is_probing = self._is_probing or self._is_up
        elif standing.is_new:
            self._new[stream_id] = None
        else:
            self._innocent[stream_id] = None

    def mark_begun(self, stream_id: int) -> None:
        """Suspect the probe, because it has got its turn."""
        if stream_id == self.probe:
            self.unproven[stream_id] = None

    def mark_proven(self, stream_id: int) -> None:
        """Clear a stream of suspicion, because it brought a token."""
        if stream_id == self.probe:
            self.probe = None
        if stream_id in self.unproven:
            del self.unproven[stream_id]
            self._num_suspected.pop(stream_id, None)

    def remove(self, stream_id: int) -> None:
        """Forget a stream that has ended for whatever reason."""
        for group in (self._sent, self.unproven, self._innocent, self._suspect, self._new):
            group.pop(stream_id, None)
        if stream_id == self.probe:
            self.probe = None
        self._num_suspected.pop(stream_id, None)
        self._num_shared.pop(stream_id, None)

    def open(self) -> None:
        """Start sending to the next engine, which is ready. The queue is open initially."""
        self._is_up = True
        self._is_probing = bool(self._suspect)

    def close(self) -> None:
        """Stop sending to a lost engine. `requeue_after_crash` follows once its last frames are read."""
        self._is_up = False

    def take_due(self) -> tuple[int, ...]:
        """Return the streams to send to the engine now, in order. They count as sent."""
        if not self._is_up or self.probe is not None:  # what is sent beside a probe would be suspected with it
            return ()
        due = [*self._innocent]
        self._innocent.clear()
        if not due and self._is_probing and not self.unproven:
            self.probe = next(iter(self._suspect), None)
            self._is_probing = self.probe is not None
            if self.probe is not None:
                del self._suspect[self.probe]
                self._sent[self.probe] = None
                return (self.probe,)
        if not self._is_probing:
            due += self._new
            self._new.clear()
        self._sent.update(dict.fromkeys(due))
        self.unproven.update(dict.fromkeys(due))
        return tuple(due)

    def requeue_after_crash(self) -> AbandonedStreams:
        """Queue the streams of the lost engine again. Returns those that are not, which stay until `remove`."""
        self.close()
        abandoned = self._find_abandoned()
        excluded = {*abandoned.poisonous, *abandoned.exhausted}
        probe = () if self.probe is None else (self.probe,)
        suspects = {s: None for s in (*self.unproven, *probe, *self._suspect) if s not in excluded}
        self._innocent = {s: None for s in self._sent if s not in suspects and s not in excluded} | self._innocent
        self._suspect = suspects
        self._sent, self.unproven, self.probe = {}, {}, None
        return abandoned

    def requeue_unharmed(self) -> None:
        """Queue the streams again that an engine no longer has, though it was not lost."""
        probe = {} if self.probe is None else {self.probe: None}
        self._suspect = probe | self._suspect
        self._innocent = {s: None for s in self._sent if s not in probe} | self._innocent
        self._sent, self.unproven, self.probe = {}, {}, None

    def _find_abandoned(self) -> AbandonedStreams:
        suspects = tuple(self.unproven)
        if not suspects:
            _count(self._num_shared, self._sent)
            exhausted = tuple(s for s in self._sent if self._num_shared[s] >= MAX_SHARED_CRASHES)
            return AbandonedStreams(exhausted=exhausted)
        _count(self._num_suspected, suspects)
        is_poisonous = len(suspects) == 1 and self._num_suspected[suspects[0]] > 1
        return AbandonedStreams(poisonous=suspects if is_poisonous else ())


class KnownAdapters:
    """The LoRA adapters of an engine: what a new one in place of a lost one must have, and which requests wait for it.
    Belongs to the client's event loop."""

    def __init__(self, folders: dict[str, str]) -> None:
        self.folders = folders
        """Folders of the adapters that were given or loaded, by name."""
        self.missing: set[str] = set()
        """Adapters that a new engine is still to load again: hold their requests."""
        self._held: list[int] = []

    def apply(self, outcome: AdapterOutcome, info: EngineInfo, *, is_answer: bool) -> EngineInfo:
        """Return what is known of the engine after a change, which answers a command of now or restores an adapter."""
        if outcome.code is None:  # those of the last engine are still to come
            info = with_adapters(info, (*outcome.adapters, *(() if is_answer else self.folders)))
            return msgspec.structs.replace(info, adapter_digests=outcome.digests)
        if not is_answer:
            log.error("LoRA adapter %s is lost with the last engine: %s", outcome.name, outcome.message)
            self.folders.pop(outcome.name, None)
            return with_adapters(info, (name for name in info.adapters if name != outcome.name))
        return info

    def config_now(self, config: EngineConfig) -> EngineConfig:
        """Return `config` for another engine: without the adapters that were unloaded or replaced since."""
        modules = config.lora_modules
        kept = {name: path for name, path in modules.items() if self.folders.get(name) == path}
        enables = config.enable_lora or kept != modules  # those that are loaded again need room
        return msgspec.structs.replace(config, lora_modules=kept, enable_lora=enables)

    def commands_for_new_engine(self, config: EngineConfig) -> list[LoadAdapter]:
        """Return what loads the adapters that an engine started with `config_now` lacks; requests of them wait."""
        self.missing = self.folders.keys() - self.config_now(config).lora_modules.keys()
        return [LoadAdapter(name, self.folders[name]) for name in self.missing]

    def with_missing(self, info: EngineInfo) -> EngineInfo:
        """Return `info` with the adapters that the engine is still to load."""
        return with_adapters(info, (*info.adapters, *self.missing))

    def lose_engine(self) -> None:
        """Forget whose adapter is missing: the engine is lost, and all requests are sent again."""
        self.missing, self._held = set(), []

    def hold(self, stream_id: int) -> None:
        """Keep a request whose adapter is missing for `take_held`."""
        self._held.append(stream_id)

    def take_held(self, name: str) -> list[int]:
        """Return the requests to send, now that the adapter is loaded or lost. Some may be held again."""
        if name not in self.missing:
            return []
        self.missing.discard(name)
        held, self._held = self._held, []
        return held


def with_adapters(info: EngineInfo, names: Iterable[str]) -> EngineInfo:
    """Return `info` with these adapters."""
    return msgspec.structs.replace(info, adapters=tuple(sorted(set(names))))


def _count(counts: dict[int, int], stream_ids: Iterable[int]) -> None:
    for stream_id in stream_ids:
        counts[stream_id] = counts.get(stream_id, 0) + 1


def with_seed(request: GenerateRequest, info: EngineInfo) -> GenerateRequest:
    """Return `request` with a seed if it samples at random, so that any engine draws the same tokens, unless `info` is
    of a sampler that would not act on it."""
    sampling = request.sampling
    if sampling.seed is not None or sampling.temperature == 0.0 or "seed" in info.refused_sampling:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, seed=secrets.randbits(63)))


def build_resumed_request(
    request: GenerateRequest, token_ids: Sequence[int], elapsed_s: float, has_started: bool
) -> GenerateRequest:
    """Return `request` for an engine that gets it `elapsed_s` after its submit, when `token_ids` were already sent
    after those that it resumes. Raises DEADLINE if no time is left."""
    sampling = request.sampling
    if token_ids and sampling.prompt_logprobs is not None:  # they were sent with the first token
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return msgspec.structs.replace(
        request,
        sampling=sampling,
        returns_context_logits=request.returns_context_logits and not token_ids,
        resume_token_ids=[*request.resume_token_ids, *token_ids],
        timeout_s=_time_left(request.timeout_s, elapsed_s),
        queue_timeout_s=None if has_started else _time_left(request.queue_timeout_s, elapsed_s),
    )


def _time_left(timeout_s: float | None, elapsed_s: float) -> float | None:
    if timeout_s is None:
        return None
    if timeout_s <= elapsed_s:
        raise SluiceError(ErrorCode.DEADLINE, f"the {timeout_s:g} s of the request passed while the engine restarted")
    return timeout_s - elapsed_s
