"""Greedy generation directly on a runner, by a batching loop that is small enough to be obviously right.

It replaces the executor in tests of the runner alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sluice.engine.arrays import FloatArray
from sluice.engine.runners.base import Runner, StepBatch
from tests.engine.runners.family_goldens import FamilyGolden

NUM_OTHERS = 31
NAN_BYTE = 0xFF
"""NaN in every floating type, if all bytes are this; in u8, the scales are NaN."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to continue, and the step at which it starts."""

    token_ids: Sequence[int]
    max_tokens: int
    repetition_penalty: float = 1.0
    first_step: int = 0


@dataclass(slots=True)
class _Sequence:
    prompt: Prompt
    blocks: list[int]
    token_ids: list[int]
    num_computed: int = 0
    is_finished: bool = False

    @property
    def generated(self) -> list[int]:
        return self.token_ids[len(self.prompt.token_ids) :]


@dataclass(slots=True)
class Driver:
    """Runs prompts together; the prefill of each is cut into chunks drawn from `chunk_sizes`."""

    runner: Runner
    chunk_sizes: Sequence[int] = (512,)
    seed: int = 0
    num_steps: int = field(default=0, init=False)

    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the tokens of each prompt. Blocks are allocated in random order, so no table is contiguous."""
        random = np.random.default_rng(self.seed)
        free = random.permutation(self.runner.info.num_blocks).tolist()
        sequences = [_Sequence(prompt, self._take_blocks(free, prompt), list(prompt.token_ids)) for prompt in prompts]
        self.num_steps = 0
        while not all(sequence.is_finished for sequence in sequences):
            live = [s for s in sequences if not s.is_finished and s.prompt.first_step <= self.num_steps]
            random.shuffle(live)
            chunks = [min(len(s.token_ids) - s.num_computed, int(random.choice(self.chunk_sizes))) for s in live]
            if live:
                self._step(live, chunks)
            self.num_steps += 1
        return [sequence.generated for sequence in sequences]

    def _take_blocks(self, free: list[int], prompt: Prompt) -> list[int]:
        count = -(-(len(prompt.token_ids) + prompt.max_tokens) // self.runner.info.block_size)
        assert count <= len(free), "the test asks for more blocks than the runner has"
        return [free.pop() for _ in range(count)]

    def _step(self, live: list[_Sequence], chunks: list[int]) -> None:
        sampling = [s.num_computed + chunk == len(s.token_ids) for s, chunk in zip(live, chunks, strict=True)]
        logits = self.runner.run(make_batch(live, chunks, sampling)).read()
        for sequence, chunk in zip(live, chunks, strict=True):
            sequence.num_computed += chunk
        sampled = [sequence for sequence, samples in zip(live, sampling, strict=True) if samples]
        for sequence, row in zip(sampled, logits, strict=True):
            self._append(sequence, row)

    def _append(self, sequence: _Sequence, row: FloatArray) -> None:
        seen = np.unique(sequence.token_ids)
        penalty = np.float32(sequence.prompt.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        token = int(row.argmax())
        sequence.token_ids.append(token)
        is_full = len(sequence.generated) == sequence.prompt.max_tokens
        sequence.is_finished = is_full or token in self.runner.info.eos_token_ids


def make_batch(live: Sequence[_Sequence], chunks: Sequence[int], sampling: Sequence[bool]) -> StepBatch:
    """Build a batch of the next `chunks[i]` tokens of each sequence, with logits of the last one if `sampling[i]`."""
    starts = [sequence.num_computed for sequence in live]
    ends = [start + chunk for start, chunk in zip(starts, chunks, strict=True)]
    begins = np.cumsum([0, *chunks])
    last_rows = begins[1:] - 1
    return StepBatch(
        token_ids=_ints([t for s, a, b in zip(live, starts, ends, strict=True) for t in s.token_ids[a:b]]),
        position_ids=_ints([p for a, b in zip(starts, ends, strict=True) for p in range(a, b)]),
        past_lens=_ints(starts),
        subsequence_begins=_ints(begins),
        block_indices=_ints([block for sequence in live for block in sequence.blocks]),
        block_indices_begins=_ints(np.cumsum([0, *(len(sequence.blocks) for sequence in live)])),
        sampled_rows=_ints(last_rows[np.array(sampling)]),
        max_context_len=max(ends),
    )


def prefill(runner: Runner, token_ids: list[int], sampled_rows: list[int]) -> FloatArray:
    """Return logits of some rows of a prompt that is run as a whole, from block 0 on."""
    num_blocks = -(-len(token_ids) // runner.info.block_size)
    batch = StepBatch(
        token_ids=np.array(token_ids, np.int32),
        position_ids=np.arange(len(token_ids), dtype=np.int32),
        past_lens=np.zeros(1, np.int32),
        subsequence_begins=np.array([0, len(token_ids)], np.int32),
        block_indices=np.arange(num_blocks, dtype=np.int32),
        block_indices_begins=np.array([0, num_blocks], np.int32),
        sampled_rows=np.array(sampled_rows, np.int32),
        max_context_len=len(token_ids),
    )
    return runner.run(batch).read()


def uniform_batch(num_seqs: int, num_new: int, num_past: int) -> StepBatch:
    """Make a batch of sequences of one length, each in blocks of its own."""
    num_blocks = -(-(num_past + num_new) // 32)
    numbers = np.arange(num_seqs + 1, dtype=np.int32)
    positions = np.arange(num_past, num_past + num_new, dtype=np.int32)
    return StepBatch(
        token_ids=np.arange(num_seqs * num_new, dtype=np.int32) % 130 + 3,
        position_ids=np.tile(positions, num_seqs),
        past_lens=np.full(num_seqs, num_past, np.int32),
        subsequence_begins=numbers * num_new,
        block_indices=np.arange(num_seqs * num_blocks, dtype=np.int32),
        block_indices_begins=numbers * num_blocks,
        sampled_rows=numbers[1:] * num_new - 1,
        max_context_len=num_past + num_new,
    )


def in_a_batch(prompt: list[int], vocab_size: int) -> StepBatch:
    """Make a prefill of `prompt` between others of every length, each in blocks of its own. It samples the prompt."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, vocab_size, 1 + 3 * other).tolist() for other in range(NUM_OTHERS)]
    prompts.insert(NUM_OTHERS // 2, prompt)
    lengths = np.array([len(each) for each in prompts], np.int32)
    begins = np.cumsum([0, *lengths], dtype=np.int32)
    num_blocks = -(-lengths // 32)
    return StepBatch(
        token_ids=np.array([token for each in prompts for token in each], np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        past_lens=np.zeros(len(prompts), np.int32),
        subsequence_begins=begins,
        block_indices=random.permutation(int(num_blocks.sum())).astype(np.int32),
        block_indices_begins=np.cumsum([0, *num_blocks], dtype=np.int32),
        sampled_rows=begins[NUM_OTHERS // 2 + 1] - 1 - np.array([len(prompt) - 1 - len(prompt) // 2, 0], np.int32),
        max_context_len=int(lengths.max()),
    )


def poison(runner: Runner, blocks: Sequence[int] | None = None) -> None:
    """Fill blocks of the cache with NaN, by default all."""
    chosen = range(runner.info.num_blocks) if blocks is None else blocks
    runner.write_blocks(chosen, [np.full(runner.block_bytes, NAN_BYTE, np.uint8)] * len(chosen))


def continuations(runner: Runner, golden: FamilyGolden) -> list[list[int]]:
    """Return the tokens of a golden's prompts, from prefill chunks and decodes mixed in one step, and decodes alone."""
    prompts = [
        Prompt(case.prompt_token_ids, case.max_tokens, first_step=2 * index) for index, case in enumerate(golden.cases)
    ]
    return Driver(runner, chunk_sizes=(7, 30, 50), seed=4).generate(prompts)


def _ints(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(values, np.int32)
