"""Which of those that fit run in this iteration, and how much of their contexts: the micro-batch scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from .capacity import Load, Stage


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`chunk_unit` is None where contexts run whole; `is_fair` is EQUAL_PROGRESS, else first come, first served."""

    max_batch_size: int
    max_num_tokens: int
    chunk_unit: int | None = None
    is_fair: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What runs: contexts with the tokens that each gets, and generations."""

    contexts: tuple[tuple[Load, int], ...]
    generations: tuple[Load, ...]


def micro_batch(fitting: Sequence[Load], limits: BatchLimits) -> MicroBatch:
    """In order of arrival, contexts and generations alike, until the batch or its tokens are full."""
    contexts: list[Load] = []
    generations: list[Load] = []
    num_tokens, beam_width = 0, 0
    for load in fitting:
        if load.stage is Stage.GENERATION:
            if beam_width not in (0, load.beam_width):
                continue  # one iteration has one beam width
            if num_tokens + load.beam_width > limits.max_num_tokens:
                break
            beam_width = load.beam_width
            num_tokens += load.beam_width
            generations.append(load)
        elif limits.chunk_unit is None:
            if num_tokens + _rest(load) > limits.max_num_tokens:
                break
            num_tokens += _rest(load)
            contexts.append(load)
        else:
            contexts.append(load)
        if len(contexts) + len(generations) >= limits.max_batch_size:
            break
    chunks = [_rest(load) for load in contexts]
    if limits.chunk_unit is not None:
        chunks = _divide(chunks, limits.max_num_tokens - num_tokens, limits.chunk_unit, is_fair=limits.is_fair)
    running = tuple((load, size) for load, size in zip(contexts, chunks, strict=True) if size)
    return MicroBatch(running, tuple(generations))


def _rest(load: Load) -> int:
    return load.num_prompt - load.num_prefilled


def _divide(rests: list[int], budget: int, unit: int, *, is_fair: bool) -> list[int]:
    if sum(rests) <= budget:
        return rests
    return _equal_progress(rests, budget, unit) if is_fair else _first_come(rests, budget, unit)


def _first_come(rests: list[int], budget: int, unit: int) -> list[int]:
    """A piece that is not the whole rest is whole units."""
    chunks = []
    for rest in rests:
        size = rest if rest <= budget else budget // unit * unit
        chunks.append(size)
        budget -= size
    return chunks


def _equal_progress(rests: list[int], budget: int, unit: int) -> list[int]:
    """Rounds of a unit each, until the budget is used or nobody can grow."""
    chunks = [0] * len(rests)
    has_grown = True
    while has_grown:
        has_grown = False
        for i, rest in enumerate(rests):
            more = min(unit, rest - chunks[i])
            if 0 < more <= budget:
                chunks[i] += more
                budget -= more
                has_grown = True
    return chunks
