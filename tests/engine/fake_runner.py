"""A runner without a model, whose output depends on every token that it reads back through the block table."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sluice.engine.arrays import ByteArray, FloatArray, Ids
from sluice.engine.runners.base import Draws, LaunchedStep, Runner, RunnerInfo, StepBatch
from sluice.engine.sampling.host_logits import HostLogits


def echo_next(token_ids: list[int], vocab_size: int) -> int:
    """Return the token that EchoRunner generates after `token_ids`: a hash of all of them and their positions."""
    total = sum((position + 1) * (token_id + 7) for position, token_id in enumerate(token_ids))
    return int((total * 2654435761 + 12345) % 2**32 % vocab_size)


def echo(prompt: list[int], num_tokens: int, vocab_size: int = 4096) -> list[int]:
    """Return the tokens that EchoRunner generates after `prompt`, computed without it."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(echo_next(token_ids, vocab_size))
    return token_ids[len(prompt) :]


class EchoRunner(Runner):
    """Stores the tokens themselves in its blocks, so that a wrong block table gives a wrong output.

    With empty `eos_token_ids`, a sequence ends only by its length. With `looks_ahead` it works as late as a device may:
    a step that was launched runs when its tokens are waited for, or before what it is asked for next.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 4096,
        num_blocks: int = 256,
        block_size: int = 32,
        max_model_len: int = 1024,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.info = RunnerInfo(
            runtime="echo",
            model_type="echo",
            dtype="f32",
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
        )
        self.num_runs = 0
        self.is_closed = False
        self._cache = np.full((num_blocks, block_size), -1, np.int64)
        self.block_bytes = block_size * 8
        self.block_identity = "echo"
        self.num_ahead = 0
        """Tokens that were not known when their step was launched."""
        self._launched: deque[EchoStep] = deque()
        self._chosen: Ids = np.zeros(0, np.intp)

    def run(self, batch: StepBatch) -> HostLogits:
        return HostLogits(self.compute(batch))

    def launch(self, batch: StepBatch, draws: Draws | None) -> LaunchedStep:
        assert len(self._launched) < 2, "at most one step is under way"
        step = EchoStep(self, batch, draws)
        self._launched.append(step)
        return step.wait

    def work_until(self, last: "EchoStep | None" = None) -> None:
        """Run what was launched, in order, by default all."""
        while self._launched and (last is None or last in self._launched):
            step = self._launched.popleft()
            try:
                token_ids = step.batch.token_ids.copy()
                is_unknown = token_ids < 0
                self.num_ahead += int(is_unknown.sum())
                token_ids[is_unknown] = self._chosen[-1 - token_ids[is_unknown]]
                logits = self.run(replace(step.batch, token_ids=token_ids))
                step.tokens = logits.argmax(np.arange(logits.num_rows))
                if step.draws is not None:
                    step.tokens[0][step.draws.rows], _ = logits.draw(step.draws)
                self._chosen = step.tokens[0]
            except Exception as error:
                step.error = error
                self._chosen = np.zeros(len(step.batch.sampled_rows), np.intp)

    def compute(self, batch: StepBatch) -> FloatArray:
        """Return the logits [num_sampled, vocab_size] of a step."""
        self.num_runs += 1
        block_size = self.info.block_size
        tokens = [self._store_and_read(batch, i, block_size) for i in range(len(batch.past_lens))]
        logits = np.zeros((len(batch.sampled_rows), self.info.vocab_size), np.float32)
        for row, token_row in enumerate(batch.sampled_rows.tolist()):
            i = int(np.searchsorted(batch.subsequence_begins, token_row, side="right")) - 1
            num_seen = len(tokens[i]) - (int(batch.subsequence_begins[i + 1]) - 1 - token_row)
            logits[row, echo_next(tokens[i][:num_seen], self.info.vocab_size)] = 1.0
        return logits

    def first_token(self, batch: StepBatch, i: int) -> int:
        """Return the first token of sequence i of a batch that was run."""
        return int(self._cache[batch.block_indices[batch.block_indices_begins[i]], 0])

    def _store_and_read(self, batch: StepBatch, i: int, block_size: int) -> list[int]:
        """Write the new tokens of sequence i to its blocks and read the whole sequence back."""
        begin, end = batch.subsequence_begins[i : i + 2].tolist()
        table = batch.block_indices[batch.block_indices_begins[i] : batch.block_indices_begins[i + 1]]
        past = int(batch.past_lens[i])
        total = past + end - begin
        assert batch.position_ids[begin:end].tolist() == list(range(past, total))
        assert len(table) * block_size >= total, "too few blocks"
        slots = table[np.arange(total) // block_size] * block_size + np.arange(total) % block_size
        flat = self._cache.reshape(-1)
        flat[slots[past:]] = batch.token_ids[begin:end]
        return [int(token) for token in flat[slots]]

    def read_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        self.work_until()
        for block, content in zip(blocks, contents, strict=True):
            content[:] = self._cache[block].view(np.uint8)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        self.work_until()
        for block, content in zip(blocks, contents, strict=True):
            self._cache[block] = content.view(np.int64)

    def close(self) -> None:
        self.is_closed = True


class EchoStep:
    """A step that EchoRunner has launched."""

    def __init__(self, runner: EchoRunner, batch: StepBatch, draws: Draws | None) -> None:
        self.batch = batch
        self.draws = draws
        self.tokens: tuple[Ids, FloatArray] = (np.zeros(0, np.intp), np.zeros(0, np.float32))
        self.error: Exception | None = None
        self._runner = runner

    def wait(self) -> tuple[Ids, FloatArray]:
        self._runner.work_until(self)
        if self.error is not None:
            raise self.error
        return self.tokens
