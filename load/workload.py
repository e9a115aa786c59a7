"""The requests of a run: prompts, images, lengths and arrival times, all decided by the seed.

Prompts are random, so that no prefix cache of the server makes them cheap.
"""

import base64
import io
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from sluice.load.apis import Prompt
from sluice.load.config import ApiKind, Arrival, LoadConfigError, RequestPace, Workload
from sluice.load.shares import WHOLE, Share
from sluice.load.stream import PlannedRequest
from sluice.load.traces import ReplayedRequest, read_trace

COMMON_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into than
them can only other new some could time these two may then do first any my now such like our over man me even most
"""

NUM_STABLE_WORDS = 512
MAX_FITTING_ROUNDS = 16
WARMUP_STREAM, REQUEST_STREAM, ARRIVAL_STREAM, PREFIX_STREAM, TURN_STREAM, IMAGE_STREAM = range(6)
"""Independent random streams of one seed: none shifts with the length of another."""


class PromptSource(ABC):
    """Makes prompts. `exactness` tells the reader of a report how exact their lengths are."""

    exactness: str

    @abstractmethod
    def make(self, rng: np.random.Generator, num_tokens: int) -> Prompt: ...


def planned_requests(
    workload: Workload, prompts: PromptSource, stream: int = REQUEST_STREAM, share: Share = WHOLE
) -> Iterator[PlannedRequest]:
    """Yield requests without end, or those of the trace. Request i does not depend on those before it.

    A request with later turns is the first of a session.
    """
    requests = _traced_requests if workload.trace is not None else _drawn_requests
    for planned in requests(workload, prompts, stream, share):
        yield _with_turns(planned, workload, prompts, stream)


def _drawn_requests(workload: Workload, prompts: PromptSource, stream: int, share: Share) -> Iterator[PlannedRequest]:
    prefixes = [
        prompts.make(np.random.default_rng((workload.seed, PREFIX_STREAM, number)), workload.prefix_tokens)
        for number in range(workload.num_prefixes if workload.prefix_tokens else 0)
    ]
    for index in share.indices():
        rng = np.random.default_rng((workload.seed, stream, index))
        prompt_tokens, output_tokens = _lengths(rng, workload)
        prompt = prompts.make(rng, prompt_tokens - workload.prefix_tokens)
        if prefixes:
            prompt = _joined(prefixes[int(rng.integers(len(prefixes)))], prompt)
        yield PlannedRequest(index, prompt, prompt_tokens, output_tokens, _leaving(rng, workload, output_tokens))


def _lengths(rng: np.random.Generator, workload: Workload) -> tuple[int, int]:
    """Draw the tokens of a prompt and of its answer."""
    prompt, output = workload.prompt_tokens, workload.output_tokens
    prompt_tokens = int(rng.integers(prompt.low, prompt.high, endpoint=True))
    return prompt_tokens, int(rng.integers(output.low, output.high, endpoint=True))


def _traced_requests(workload: Workload, prompts: PromptSource, stream: int, share: Share) -> Iterator[PlannedRequest]:
    assert workload.trace is not None, "planned_requests asks only for a workload with a trace"
    for index, traced in enumerate(read_trace(workload.trace)):
        if not share.owns(index):
            continue
        rng = np.random.default_rng((workload.seed, stream, index))
        prompt: Prompt
        if traced.text is not None and not isinstance(prompts, TokenIds):
            prompt = traced.text
        else:
            prompt = _pieced(workload, traced, prompts, rng)
        leaving = _leaving(rng, workload, traced.output_tokens)
        yield PlannedRequest(index, prompt, traced.prompt_tokens, traced.output_tokens, leaving, traced.at_s)


def _with_turns(first: PlannedRequest, workload: Workload, prompts: PromptSource, stream: int) -> PlannedRequest:
    """Add images to a request, and the later turns of its session."""
    if workload.turns.high == 1 and not workload.num_images:
        return first
    rng = np.random.default_rng((workload.seed, TURN_STREAM, stream, first.index))
    num_turns = int(rng.integers(workload.turns.low, workload.turns.high, endpoint=True))
    later = []
    for number in range(2, num_turns + 1):
        think_s = float(rng.uniform(workload.think_s.low, workload.think_s.high))
        prompt_tokens, output_tokens = _lengths(rng, workload)
        turn = PlannedRequest(
            first.index,
            prompts.make(rng, prompt_tokens),
            prompt_tokens,
            output_tokens,
            _leaving(rng, workload, output_tokens),
            turn=number,
            think_s=think_s,
        )
        later.append(_with_images(turn, workload, stream))
    return replace(_with_images(first, workload, stream), later=tuple(later))


def _with_images(planned: PlannedRequest, workload: Workload, stream: int) -> PlannedRequest:
    if not workload.num_images:
        return planned
    rng = np.random.default_rng((workload.seed, IMAGE_STREAM, stream, planned.index, planned.turn))
    return replace(planned, images=draw_images(rng, workload.num_images, workload.image_size))


def _pieced(workload: Workload, traced: ReplayedRequest, prompts: PromptSource, rng: np.random.Generator) -> Prompt:
    """Make a prompt whose pieces are the same in each prompt that has them, followed by words of its own."""
    num_own = traced.prompt_tokens - sum(tokens for _, tokens in traced.pieces)
    made = [
        prompts.make(np.random.default_rng((workload.seed, PREFIX_STREAM, number)), tokens)
        for number, tokens in traced.pieces
    ]
    parts = [*made, prompts.make(rng, num_own)] if num_own > 0 or not made else made
    return reduce(_joined, parts)


def _joined(prefix: Prompt, rest: Prompt) -> Prompt:
    if isinstance(prefix, list) and isinstance(rest, list):
        return prefix + rest
    return f"{prefix} {rest}"


def _leaving(rng: np.random.Generator, workload: Workload, output_tokens: int) -> int | None:
    """Draw the token event after which the client of a request leaves, None for one that stays."""
    if not workload.cancelled_share or rng.random() >= workload.cancelled_share:
        return None
    return int(rng.integers(1, output_tokens, endpoint=True))


def due_requests(
    requests: Iterator[PlannedRequest], pace: RequestPace, seed: int, share: Share = WHOLE
) -> Iterator[tuple[float, PlannedRequest]]:
    """Yield each request of an open loop with the seconds from the run's start to its intended send.

    Request i has arrival i, whoever sends it: the processes of a client together send the asked arrivals.
    """
    if pace.replay_speed is None:
        offsets = (offset for index, offset in enumerate(arrival_offsets(pace, seed)) if share.owns(index))
        yield from zip(offsets, requests, strict=False)
        return
    for planned in requests:
        assert planned.at_s is not None, "make_config checks that the trace has times"
        yield planned.at_s / pace.replay_speed, planned


def arrival_offsets(pace: RequestPace, seed: int) -> Iterator[float]:
    """Yield the seconds from the run's start to each intended send; the first is 0.

    Gaps are drawn for a rate of one a second, and stretched by the rate of the moment: that of a ramp is found by
    solving its integral, `first * t + (last - first) * t^2 / (2 * duration)`, for the number of requests so far.
    """
    assert pace.request_rate is not None, "an open loop needs a rate"
    rng = np.random.default_rng((seed, ARRIVAL_STREAM))
    num_due = 0.0
    while True:
        offset = _moment(pace, num_due)
        if offset is None:
            return
        yield offset
        num_due += _gap(pace, rng)


def _gap(pace: RequestPace, rng: np.random.Generator) -> float:
    match pace.arrival:
        case Arrival.CONSTANT:
            return 1.0
        case Arrival.POISSON:
            return float(rng.exponential())
        case Arrival.GAMMA:
            return float(rng.gamma(pace.burstiness, 1.0 / pace.burstiness))


def _moment(pace: RequestPace, num_due: float) -> float | None:
    """Return the time at which `num_due` requests are due, None if a ramp that falls to 0 never has as many."""
    first = pace.request_rate or 0.0
    if pace.final_rate is None or pace.final_rate == first:
        return num_due / first
    assert pace.duration_s is not None, "RequestPace checks that a ramp has a duration"
    slope = (pace.final_rate - first) / pace.duration_s
    square = first * first + 2.0 * slope * num_due
    return None if square < 0.0 else (math.sqrt(square) - first) / slope


def requests_for(pace: RequestPace, requests: Iterator[PlannedRequest]) -> Iterator[PlannedRequest]:
    """Limit requests to the number of `pace`. They are made at once, to keep that work out of the measurement."""
    if pace.num_requests is None:
        return requests
    return iter(list(first_requests(requests, pace.num_requests)))


def first_requests(requests: Iterator[PlannedRequest], number: int) -> Iterator[PlannedRequest]:
    """Limit requests, or a share of them, to the first `number` of all."""
    return itertools.takewhile(lambda planned: planned.index < number, requests)


def prompt_source(api: ApiKind, workload: Workload) -> PromptSource:
    """Return token ids where the API takes them, else words: of exact length with a tokenizer, else approximate."""
    if workload.tokenizer is not None:
        return FittedWords(workload.tokenizer)
    if api in (ApiKind.COMPLETIONS, ApiKind.EMBEDDINGS):
        return TokenIds(workload.vocab_size)
    return ApproximateWords()


class TokenIds(PromptSource):
    """Makes prompts of random token ids, whose length is exact without a tokenizer.

    The lowest quarter of the vocabulary is left out, where special tokens and single bytes usually are.
    """

    exactness = "exact: random token ids"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise LoadConfigError(f"vocab size {vocab_size}: must be at least 2")
        self._low, self._high = vocab_size // 4, vocab_size

    def make(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        ids: list[int] = rng.integers(self._low, self._high, num_tokens).tolist()
        return ids


class ApproximateWords(PromptSource):
    """Makes prompts of common English words. Each counts as one token, which most vocabularies nearly confirm."""

    exactness = "approximate: common words, one counted as one token; --tokenizer makes them exact"

    def __init__(self) -> None:
        self._words = COMMON_WORDS.split()

    def make(self, rng: np.random.Generator, num_tokens: int) -> str:
        return " ".join(rng.choice(self._words, num_tokens).tolist())


class FittedWords(PromptSource):
    """Makes prompts of words that are one token each for a tokenizer, fitted until the whole has the exact length.

    The length is that of the text itself; a chat template and a beginning-of-sequence token add to it.
    """

    exactness = "exact: words fitted with the tokenizer (template and special tokens not counted)"

    def __init__(self, path: Path) -> None:
        self._tokenizer = _load_tokenizer(path)
        self._words = self._stable_words()

    def make(self, rng: np.random.Generator, num_tokens: int) -> str:
        """Make a text of exactly `num_tokens`. Raises `LoadConfigError` where the tokenizer has none."""
        words: list[str] = rng.choice(self._words, num_tokens).tolist()
        for _ in range(MAX_FITTING_ROUNDS):
            surplus = self._count(" ".join(words)) - num_tokens
            if surplus == 0:
                return " ".join(words)
            words = words[:-surplus] if surplus > 0 else [*words, *rng.choice(self._words, -surplus).tolist()]
        raise LoadConfigError(f"no text of exactly {num_tokens} tokens found with this tokenizer")

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _stable_words(self) -> list[str]:
        """Find words that add exactly one token after another word."""
        alone = self._count("the")
        candidates = dict.fromkeys(
            word
            for token_id in range(self._tokenizer.get_vocab_size())
            if len(word := self._tokenizer.decode([token_id]).strip()) > 1 and word.isascii() and word.isalpha()
        )
        stable: list[str] = []
        for word in candidates:
            if self._count(f"the {word}") == alone + 1:
                stable.append(word)
            if len(stable) == NUM_STABLE_WORDS:
                break
        if not stable:
            raise LoadConfigError("this tokenizer has no word that is one token; leave --tokenizer out")
        return stable


def _load_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise LoadConfigError("--tokenizer needs the tokenizers package: pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise LoadConfigError(f"--tokenizer {path}: no such file")
    return Tokenizer.from_file(str(file))


BLOCK = 16
"""Pixels of a side of a block. Noise by the pixel would make files several times as large as a photograph's."""


def draw_images(rng: np.random.Generator, number: int, size: tuple[int, int]) -> tuple[str, ...]:
    """Draw PNG images of `size` (width, height), in base64."""
    return tuple(_draw(rng, size) for _ in range(number))


def _draw(rng: np.random.Generator, size: tuple[int, int]) -> str:
    try:
        from PIL import Image  # only here: runs without images need not wait for it
    except ImportError as error:
        raise LoadConfigError(f"--images needs Pillow ({error}): pip install 'sluice[images]'") from None

    width, height = (-(-each // BLOCK) for each in size)
    blocks = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    whole = blocks.resize((width * BLOCK, height * BLOCK), Image.Resampling.NEAREST).crop((0, 0, *size))
    file = io.BytesIO()
    whole.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
