"""Everything before a sequence runs: what is refused, what waits for what, and for how long."""

from collections.abc import Collection, Iterator

from engine.config import EngineConfig
from engine.errors import ErrorCode, SluiceError
from engine.forecast.forecast import Forecast
from engine.frames import Submit
from engine.kv.blocks import worst_case_blocks
from engine.scheduling.admission import Prediction, Room, check_queue
from engine.scheduling.compiling import CompilingGrammars
from engine.scheduling.queue import WaitingQueue
from engine.sequence import Sequence
from engine.types import EngineInfo
from engine.validation import check_request

Refusal = tuple[Sequence, SluiceError]


class Intake:
    """The queue, the grammars being compiled beside it, and the forecast. Used by the engine thread alone."""

    def __init__(self, info: EngineInfo, config: EngineConfig) -> None:
        self._info = info
        self._config = config
        self._grammars = CompilingGrammars(config.model_path, info)
        self.queue: WaitingQueue[Sequence] = WaitingQueue(config.tenant_weights)
        self.forecast = Forecast(info)

    def __len__(self) -> int:
        return len(self.queue) + len(self._grammars)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self.queue, *self._grammars])

    @property
    def is_compiling(self) -> bool:
        """Whether some sequence waits for its grammar."""
        return len(self._grammars) > 0

    def get(self, stream_id: int) -> Sequence | None:
        """The sequence, if it waits."""
        return self.queue.get(stream_id) or self._grammars.get(stream_id)

    def submit(self, command: Submit, running: Collection[Sequence], free_blocks: int, now: float) -> None:
        """Let the request wait, with `free_blocks` not reserved by those who run.

        Raises SluiceError: INVALID for what can never be served, OVERLOADED where the queue is full, DEADLINE where
        the wait would be too long. What an engine before this one had accepted is not refused for its number.
        """
        request = command.request
        check_request(request, self._info)
        num_blocks = worst_case_blocks(
            len(request.prompt_token_ids), request.sampling.max_tokens, self._info.block_size
        )
        ahead = self.queue.ahead_of(request.priority, request.tenant)
        wait_s = self.forecast.wait_s(running, ahead, num_blocks, free_blocks)
        if not command.was_accepted:
            room = Room(self._info.max_num_seqs - len(running), free_blocks)
            prediction = Prediction(wait_s, self.forecast.is_warm)
            check_queue(request, num_blocks, self.queue.backlog, room, self._config, prediction)
        sequence = Sequence(command.stream_id, request, self._info, now)
        sequence.predicted_wait_s = wait_s
        if request.sampling.grammar is not None:
            self._grammars.add(sequence, request.sampling.grammar)
        else:
            self.queue.add(sequence)

    def enqueue_compiled(self) -> list[Refusal]:
        """Queue the sequences whose grammar is ready; returns those whose grammar cannot be kept to."""
        refused: list[Refusal] = []
        for sequence, outcome in self._grammars.take_done():
            try:
                if isinstance(outcome, SluiceError):
                    raise outcome
                sequence.open_sampling(self._info.vocab_size, outcome)
                self.queue.add(sequence)
            except SluiceError as error:
                refused.append((sequence, error))
        return refused

    def expired(self, now: float) -> list[Sequence]:
        """Those that waited for longer than they may."""
        compiling = [s for s in self._grammars if now >= min(s.deadline, s.start_deadline)]
        return [*self.queue.expired(now), *compiling]

    def predict_wait(self, running: Collection[Sequence], free_blocks: int) -> float:
        """What a small request of the default kind would wait now, in seconds."""
        return self.forecast.wait_s(running, self.queue.ahead_of(0, ""), 1, free_blocks)

    def remove(self, stream_id: int) -> None:
        """Forget the sequence, whether it waits or runs; unknown ones are no error."""
        self.queue.remove(stream_id)
        self._grammars.remove(stream_id)

    def close(self) -> None:
        """End the threads that compile."""
        self._grammars.close()


def too_late(sequence: Sequence, now: float) -> SluiceError:
    """Which of its two times the sequence is past."""
    request = sequence.request
    if now >= sequence.deadline:
        message = f"the request was not complete within its {request.timeout_s:g} s"
    else:
        message = f"the request waited for longer than its {request.queue_timeout_s:g} s"
    return SluiceError(ErrorCode.DEADLINE, f"{message}; the server is busy")
