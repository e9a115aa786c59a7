"""Takes requests in: checks them, compiles their grammars, and queues their sequences until they run."""

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.engine.config import EngineConfig
from sluice.engine.frames import Submit
from sluice.engine.loop.recorder import Step
from sluice.engine.sampling.state import Constraint
from sluice.engine.scheduling.admission import AdmissionController, Backlog
from sluice.engine.sequence import Sequence
from sluice.engine.types import EngineInfo, Grammar
from sluice.engine.validation import check_request
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from sluice.engine.guidance.compiler import GrammarCompiler
    from sluice.engine.guidance.matching import CompiledGrammar


class Intake(AdmissionController[Sequence]):
    """The waiting queue, the grammars being compiled beside it, and the forecast. Used by the engine thread alone."""

    def __init__(self, info: EngineInfo, config: EngineConfig, clock: Callable[[], float]) -> None:
        super().__init__(info, config, clock)
        self._grammars = PendingGrammars(config.model_path, info)

    def __len__(self) -> int:
        return len(self.queue) + len(self._grammars)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self.queue, *self._grammars])

    @property
    def vocab_size(self) -> int:
        return self._info.vocab_size

    @property
    def is_compiling(self) -> bool:
        """Whether a sequence waits for its grammar."""
        return len(self._grammars) > 0

    def observe_step(self, step: Step, seconds: float) -> None:
        """Let the forecast learn from a step that took so long, with the wait for it."""
        self.forecast.observe_step(step.num_seqs, step.num_prefill, seconds)
        self.forecast.pace.observe(step.num_prefill, step.runner_seconds)

    def get(self, stream_id: int) -> Sequence | None:
        """Return the sequence if it waits."""
        return self.queue.get(stream_id) or self._grammars.get(stream_id)

    def use(self, info: EngineInfo) -> None:
        """Check further requests against `info`, whose adapters have changed."""
        self._info = info

    def submit(
        self,
        command: Submit,
        running: Collection[Sequence],
        free_blocks: int,
        now: float,
        count_started: Callable[[Iterable[Sequence]], int],
        adapter: tuple[int, str] = (0, ""),
    ) -> None:
        """Queue a request; `free_blocks` is how many blocks no running sequence reserves, `count_started` returns how
        many of the given sequences, in order, the next step would take, and `adapter` is the runner's number of the
        request's adapter and its digest. Raises INVALID for a request that can never be served, OVERLOADED if
        the queue is full, DEADLINE if the wait would be too long. A request that a lost engine had accepted is not
        rejected for the queue."""
        request = command.request
        check_request(request, self._info)
        most = self._config.max_replayed_tokens
        sequence = Sequence(command.stream_id, request, self._info, now, *adapter, max_replayed_tokens=most)
        self.admit_to_queue(
            sequence,
            running,
            free_blocks,
            now,
            backlog=Backlog(
                len(self),
                self._info.max_num_seqs - len(running),
                lambda queued: count_started(chain(queued, self._grammars)),
            ),
            was_accepted=command.was_accepted,
            most_wait_s=command.most_wait_s,
        )
        if request.sampling.grammar is not None:
            self._grammars.add(sequence, request.sampling.grammar)
        else:
            self.queue.add(sequence)

    def enqueue_compiled(self) -> list[tuple[Sequence, SluiceError]]:
        """Queue the sequences whose grammar is compiled. Returns those whose grammar cannot be used."""
        failed: list[tuple[Sequence, SluiceError]] = []
        for sequence, outcome in self._grammars.take_done():
            try:
                if isinstance(outcome, SluiceError):
                    raise outcome
                sequence.start_sampling(self._info.vocab_size, outcome)
                self.queue.add(sequence)
            except SluiceError as error:
                failed.append((sequence, error))
        return failed

    def expired(self, now: float) -> list[Sequence]:
        """Return the waiting sequences that are past a deadline."""
        compiling = [s for s in self._grammars if now >= min(s.deadline, s.start_deadline)]
        return [*self.queue.expired(now), *compiling]

    def remove(self, stream_id: int) -> None:
        """Forget the sequence, whether it waits or runs. An unknown one is no error."""
        self.queue.remove(stream_id)
        self._grammars.remove(stream_id)

    def close(self) -> None:
        """End the threads that compile."""
        self._grammars.close()


class PendingGrammars:
    """Sequences whose grammar is being compiled. They wait beside the queue, so that they delay no other sequence. Used
    by the engine thread; the compiler's own threads do the work."""

    def __init__(self, model_path: str, info: EngineInfo) -> None:
        self._model_path = model_path
        self._info = info
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[int, tuple[Sequence, Future[CompiledGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for sequence, _ in self._waiting.values()])

    def add(self, sequence: Sequence, grammar: Grammar) -> None:
        """Start to compile `grammar`, unless it is compiled already."""
        if self._compiler is None:
            from sluice.engine.guidance.compiler import GrammarCompiler  # loaded with the first grammar

            self._compiler = GrammarCompiler(Path(self._model_path), self._info.vocab_size, self._info.eos_token_ids)
        self._waiting[sequence.stream_id] = (sequence, self._compiler.compile(grammar))

    def get(self, stream_id: int) -> Sequence | None:
        entry = self._waiting.get(stream_id)
        return None if entry is None else entry[0]

    def remove(self, stream_id: int) -> None:
        self._waiting.pop(stream_id, None)

    def take_done(self) -> list[tuple[Sequence, Constraint | SluiceError]]:
        """Remove and return the sequences whose grammar is done, each with its constraint or the error."""
        done = [(sequence, future) for sequence, future in self._waiting.values() if future.done()]
        for sequence, _ in done:
            del self._waiting[sequence.stream_id]
        return [(sequence, _outcome(future)) for sequence, future in done]

    def close(self) -> None:
        """End the compiler's threads."""
        if self._compiler is not None:
            self._compiler.close()


def _outcome(future: "Future[CompiledGrammar]") -> Constraint | SluiceError:
    try:
        return future.result().constraint()
    except SluiceError as error:
        return error
    except Exception as error:
        return SluiceError(ErrorCode.INTERNAL, f"compiling the grammar failed: {error}")
