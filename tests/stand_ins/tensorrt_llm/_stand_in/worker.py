# ruff: noqa: TID252 - importers know the package as tensorrt_llm, the type checker by its folder
"""The executor behind the LLM classes: a thread of iterations."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..bindings.executor import FinishReason
from .kv_cache import KvCache, Prefix
from .responses import Response
from .schedulers import POLICIES, BatchLimits, Cache, Load, MicroBatch, Stage, micro_batch
from .settings import settings
from .statistics import Iteration, statistics
from .transceiver import Transceiver
from .work import Work

_WAIT = "import sys; sys.stdin.read()"
_TRANSFER_S = 0.001
"""How often a worker that has only transfers looks for them."""
_IDLE_S = 0.05
"""How often an idle worker looks whether its ranks live."""


class Ranks:
    """One process a rank where there are several; they end when this process does."""

    def __init__(self, world_size: int) -> None:
        count = world_size if world_size > 1 else 0
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", _WAIT, f"stand-in-rank={rank}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(count)
        ]

    def dead(self) -> int | None:
        """Return the number of a rank that is gone, None while all live."""
        return next((rank for rank, process in enumerate(self._processes) if process.poll() is not None), None)

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The capacity of one iteration, and the policy that shares it."""

    batch: BatchLimits
    policy: str
    num_blocks: int
    tokens_per_block: int
    has_stats: bool
    by_priority: bool = False
    """Whether requests that wait are taken by priority, else in order of arrival."""


class Worker:
    """Everything that changes between iterations is changed by its own thread alone; others leave orders."""

    def __init__(
        self, limits: WorkerLimits, ranks: Ranks, kv_cache: KvCache, transceiver: Transceiver | None = None
    ) -> None:
        self._kv_cache = kv_cache
        self._transceiver = transceiver
        self.failure: str | None = None
        self.is_hanging = False
        self.mpi_futures: list[Future[None]] = [Future()]
        """Done where a rank has ended."""
        self.error_queue: queue.Queue[Exception] = queue.Queue()
        self._limits = limits
        self._ranks = ranks
        self._policy = POLICIES[limits.policy]
        self._changed = threading.Condition()
        self._arrived: deque[tuple[Work, Callable[[Response], None]]] = deque()
        self._cancelled: set[int] = set()
        self._is_closed = False
        self._active: dict[int, Work] = {}
        self._answer: dict[int, Callable[[Response], None]] = {}
        self._iteration = 0
        self._num_tokens = 0
        self._allocated = self._reused = self._missed = 0
        self.tell_stats: Callable[[str], None] | None = None
        self.tell_event: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._run, name="stand-in-iterations", daemon=True)
        self._thread.start()

    def submit(self, work: Work, answer: Callable[[Response], None]) -> None:
        with self._changed:
            self._arrived.append((work, answer))
            self._changed.notify()

    def abort_request(self, request_id: int) -> None:
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify()

    def control(self, action: Callable[[KvCache], None]) -> None:
        """Act between iterations, once all requests have ended."""
        while self._arrived or self._active:
            time.sleep(_IDLE_S / 10)
        action(self._kv_cache)

    def fail(self, reason: str) -> None:
        """Die of an exception in the loop."""
        self._die(reason)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._kv_cache.events.close()
        self._ranks.close()
        if self._transceiver is not None:
            self._transceiver.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._has_work or self._is_closed):
                    self._changed.wait(_IDLE_S)
                if self._is_closed:
                    return
            if self._survives() and not self.is_hanging:
                self._release_sent()
            if self._survives() and self._has_work:
                self._iterate()

    @property
    def _has_work(self) -> bool:
        is_able = not self.is_hanging and self.failure is None
        return is_able and bool(self._arrived or self._active or self._cancelled)

    def _survives(self) -> bool:
        """Whether all ranks live and no fault has stopped it."""
        if self.failure is not None or self.is_hanging:
            return False
        rank = self._ranks.dead()
        if rank is None:
            return True
        self._die(f"rank {rank} is gone")
        return False

    def _die(self, reason: str) -> None:
        error = RuntimeError(f"The executor has failed: {reason}")
        self.mpi_futures[0].set_exception(error)
        self.error_queue.put(error)
        match settings().rank_death:
            case "exit":
                os._exit(1)
            case "hang":
                self.is_hanging = True
            case _:
                self.failure = reason
                gone = Response(error=f"The executor has failed: {reason}", is_only_this_request=False)
                with self._changed:
                    waiting = [answer for _, answer in self._arrived]
                    self._arrived.clear()
                for answer in (*self._answer.values(), *waiting):
                    answer(gone)
                self._active.clear()
                self._answer.clear()

    def _release_sent(self) -> None:
        for request_id in () if self._transceiver is None else self._transceiver.released():
            self._kv_cache.release(request_id)

    def _receive(self) -> int:
        """Let requests begin whose contexts have come, and fail the others; return how many ended."""
        num_ended = 0
        for request_id, outcome in () if self._transceiver is None else self._transceiver.arrived():
            work = self._active.get(request_id)
            if work is None:  # cancelled meanwhile
                continue
            if isinstance(outcome, str):
                del self._active[request_id]
                self._kv_cache.release(request_id)
                self._answer.pop(request_id)(Response(error=outcome))
                num_ended += 1
                continue
            work.go_on_from(outcome, self._iteration)
            self._kv_cache.store(request_id, work.context, root_of(work))
            if work.is_finished:
                self._finish(work)
                num_ended += 1
            elif work.has_response:
                self._answer[request_id](work.response(self._iteration))
        return num_ended

    def _start_transfers(self, scheduled: tuple[Load, ...]) -> tuple[Load, ...]:
        """Allocate blocks for the contexts that are to be fetched, and ask for them. Return the requests that run."""
        running = []
        for load in scheduled:
            work = self._active[load.request_id]
            if load.stage is Stage.GENERATION or not work.is_fetched:
                running.append(load)
            elif load.stage is Stage.FIRST_CHUNK:
                assert self._transceiver is not None
                load.held_per_beam = -(-load.num_prompt // self._limits.tokens_per_block)
                self._kv_cache.share(load.request_id, Prefix((), 0, None))
                self._kv_cache.begin(load.request_id, load.num_prompt)
                work.first_scheduled = time.monotonic()
                self._transceiver.fetch(load.request_id, work.order.disaggregated_params)
        if scheduled and not running:
            time.sleep(_TRANSFER_S)
        return tuple(running)

    def _iterate(self) -> None:
        began = time.monotonic()
        self._iteration += 1
        num_new = self._take_in()
        completed = self._cancel_those_asked() + self._receive()
        self._look_up()
        loads = [work.load for work in self._active.values()]
        fitting = self._policy(loads, self._cache(), self._limits.batch.max_batch_size)
        for load in fitting.paused:
            self._active[load.request_id].start_again()
            self._kv_cache.release(load.request_id)
        batch = micro_batch(self._start_transfers(fitting.scheduled), self._limits.batch)
        allocated = self._allocated
        self._prefill(batch)
        self._decode(batch)
        if settings().step_s:
            time.sleep(settings().step_s)
        completed += self._answer_all(batch)
        self._tell(began, num_new, completed, len(fitting.paused), batch, self._allocated - allocated)
        self._obey_faults()

    def _take_in(self) -> int:
        """Requests become active while there are places."""
        count = 0
        with self._changed:
            while self._arrived and len(self._active) < self._limits.batch.max_batch_size:
                work, answer = self._next()
                self._active[work.order.request_id] = work
                self._answer[work.order.request_id] = answer
                count += 1
        return count

    def _next(self) -> tuple[Work, Callable[[Response], None]]:
        """Take the first request of the highest priority, or of all."""
        if not self._limits.by_priority:
            return self._arrived.popleft()
        first = max(self._arrived, key=lambda pair: pair[0].order.priority)
        self._arrived.remove(first)
        return first

    def _cancel_those_asked(self) -> int:
        with self._changed:
            asked, self._cancelled = self._cancelled, set()
            waiting = [pair for pair in self._arrived if pair[0].order.request_id in asked]
            for pair in waiting:
                self._arrived.remove(pair)
        for work, answer in waiting:
            work.cancel()
            answer(work.response(self._iteration))
        active = [self._active[request_id] for request_id in asked if request_id in self._active]
        for work in active:
            work.cancel()
            self._finish(work)
        return len(active) + len(waiting)

    def _look_up(self) -> None:
        """Look up which blocks the cache holds of the requests that have not started, and of those that have."""
        for work in self._active.values():
            work.load.num_private = self._kv_cache.num_private(work.load.request_id)
            if work.load.stage is Stage.FIRST_CHUNK and not work.is_fetched:
                work.prefix = self._kv_cache.find(work.context, root_of(work))
                work.num_cached = len(work.prefix.blocks) * self._limits.tokens_per_block
                work.load.take_prefix(work.prefix, self._limits.tokens_per_block)

    def _cache(self) -> Cache:
        has_credit = settings().version != "1.2.1"
        return Cache(self._kv_cache.num_free, self._limits.tokens_per_block, has_credit=has_credit)

    def _prefill(self, batch: MicroBatch) -> None:
        size = self._limits.tokens_per_block
        for load, _ in batch.contexts:
            if load.stage is Stage.FIRST_CHUNK:
                self._kv_cache.share(load.request_id, self._active[load.request_id].prefix)
        for load, count in batch.contexts:
            work = self._active[load.request_id]
            if load.stage is Stage.FIRST_CHUNK:
                work.first_scheduled = time.monotonic()
                load.held_per_beam = -(-load.num_prompt // size)
                self._kv_cache.begin(load.request_id, load.num_prompt, load.beam_width)
                work.num_reused_blocks = work.num_cached // size
                work.num_missed_blocks = load.held_per_beam - work.num_reused_blocks
                self._allocated += work.num_missed_blocks
                self._reused += work.num_reused_blocks
                self._missed += work.num_missed_blocks
            load.num_prefilled += count
            if load.num_prefilled >= load.num_prompt:
                self._store(work, work.context[:-1])
                work.generate(self._iteration)

    def _decode(self, batch: MicroBatch) -> None:
        size = self._limits.tokens_per_block
        for load in batch.generations:
            needed = -(-load.num_tokens // size)
            grown = max(needed - load.held_per_beam, 0) * load.beam_width
            self._kv_cache.grow(load.request_id, grown)
            self._allocated += grown
            load.held_per_beam = max(load.held_per_beam, needed)
            self._active[load.request_id].generate(self._iteration)

    def _answer_all(self, batch: MicroBatch) -> int:
        """Send the responses of this iteration; return how many requests finished."""
        num_completed = 0
        generated = [load for load, _ in batch.contexts if load.num_generated] + list(batch.generations)
        for load in generated:
            work = self._active[load.request_id]
            self._num_tokens += 1
            if work.is_finished:
                self._finish(work)
                num_completed += 1
            elif work.has_response:
                self._answer[load.request_id](work.response(self._iteration))
        return num_completed

    def _finish(self, work: Work) -> None:
        request_id = work.order.request_id
        del self._active[request_id]
        if work.load.num_generated and len(work.sequences) == 1:
            self._store(work, work.sequences[0].token_ids[:-1], is_end=True)
        if (
            self._transceiver is not None
            and work.order.is_part("context_only")
            and work.sequences[0].finish_reason is not FinishReason.CANCELLED
        ):
            work.disaggregated_params = self._offer(self._transceiver, work)
        else:
            self._kv_cache.release(request_id)
        self._answer.pop(request_id)(work.response(self._iteration))

    def _offer(self, transceiver: Transceiver, work: Work) -> Any:
        """Keep the blocks of a context, and return what the generation server needs. The answer is the last one: it
        cannot be aborted any more."""
        asked, [sequence] = work.order.disaggregated_params, work.sequences
        transfer_id = getattr(asked, "disagg_request_id", None) or work.order.request_id
        if settings().version == "1.2.1" and sequence.finish_reason is FinishReason.LENGTH:
            sequence.finish_reason = FinishReason.NOT_FINISHED
        return type(asked)(
            request_type="context_only",
            first_gen_tokens=sequence.shown.copy(),
            ctx_request_id=transfer_id,
            opaque_state=transceiver.offer(work.order.request_id, transfer_id, work.context),
        )

    def _tell(
        self, began: float, num_new: int, num_completed: int, num_paused: int, batch: MicroBatch, allocated: int
    ) -> None:
        self._kv_cache.events.flush()
        if self.tell_event is not None:
            for event in self._kv_cache.events.take():
                self.tell_event(event)
        if self.tell_stats is None or not self._limits.has_stats or settings().fault("stats_empty") is not None:
            return
        told = Iteration(
            number=self._iteration,
            latency_ms=(time.monotonic() - began) * 1000,
            num_new=num_new,
            num_active=len(self._active),
            num_queued=len(self._arrived),
            num_completed=num_completed,
            num_contexts=len(batch.contexts),
            num_generations=len(batch.generations),
            num_paused=num_paused,
            context_tokens=sum(count for _, count in batch.contexts),
            max_active=self._limits.batch.max_batch_size,
            max_batch_size=self._limits.batch.max_batch_size,
            max_num_tokens=self._limits.batch.max_num_tokens,
            max_blocks=self._limits.num_blocks,
            free_blocks=self._cache().free_blocks,
            tokens_per_block=self._limits.tokens_per_block,
            allocated_total=self._allocated,
            allocated_new=allocated,
            reused=self._reused,
            missed=self._missed,
        )
        self.tell_stats(json.dumps(statistics(told, has_parts=settings().fault("stats_null") is None)))

    def _store(self, work: Work, token_ids: list[int], *, is_end: bool = False) -> None:
        order = work.order
        self._kv_cache.store(
            order.request_id, token_ids, root_of(work), is_end=is_end, salt=order.salt, adapter=order.adapter
        )

    def _obey_faults(self) -> None:
        if self._has_reached("hang_after"):
            self.is_hanging = True
        if self._has_reached("exit_after"):
            os._exit(70)

    def _has_reached(self, fault: str) -> bool:
        limit = settings().fault(fault)
        return limit is not None and self._num_tokens >= int(limit) and settings().claims(fault)


def root_of(work: Work) -> int:
    """Return the start of its blocks' hashes: only requests of one salt, adapter and, where these are hashed, images
    share blocks."""
    images = work.order.images if work.order.are_images_hashed else 0
    return hash((work.order.salt, work.order.adapter, images)) % 2**63


class Front:
    """What the LLM's front knows of its workers."""

    def __init__(self, worker: Worker) -> None:
        self.mpi_futures = worker.mpi_futures
        self._error_queue = worker.error_queue

    def is_shutdown(self) -> bool:
        """It does not know of dead ranks by itself."""
        return False
