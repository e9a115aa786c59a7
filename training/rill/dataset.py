"""Steps 3 and 6: packs plain text, chat, questions with contexts and tool calls into shards of uint16 rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tqdm import tqdm

from training.rill import tokenizer as tokenizer_step
from training.rill.conversation import ANSWER_WEIGHT, BOS, SPECIAL_TOKENS, Conversation, choices
from training.rill.corpus import WORK, Corpus, load
from training.rill.pairs_chat import ChatExamples
from training.rill.pairs_rag import RagExamples, RagMix
from training.rill.pairs_tools import ToolExamples
from training.rill.schedule import FINE_TUNING, PHASES
from training.rill.sources import SOURCES

_WAITING = 64  # examples to choose from when a row is filled
UNIT = 40  # a weight of one, as stored
CHOICE_TOKENS = 3  # number of an answer's first tokens with `choice_weight`
_LEAST_FILL = 24  # a smaller gap is padded

Tokens = npt.NDArray[np.uint16]
Weights = npt.NDArray[np.uint8]
Encoded = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the rows. Rows that are none of these are questions with contexts.

    `text_weight` is a factor of the weight of plain text and prompts: their loss is large, and not to be had down, so
    that it would drown that of answers in a short training.
    """

    plain: float
    chat: float
    rag: RagMix
    tools: float = 0.0
    text_weight: float = 1.0


MIXES = {
    "short": Mix(0.16, 0.15, RagMix(0.45, 0.12, (1, 1, 2, 2, 3), (1, 2, 3, 4, 5))),
    "middle": Mix(0.13, 0.15, RagMix(0.25, 0.1, (1, 2, 3, 3, 3, 4), (1, 2, 3, 4, 6))),
    "long": Mix(0.14, 0.16, RagMix(0.25, 0.1, (1, 2, 3, 3, 3, 4, 5, 6), (1, 2, 3, 4, 6, 8))),
    "tools": Mix(0.02, 0.15, RagMix(0.28, 0.1, (1, 1, 2, 3, 3, 4), (1, 2, 3, 4, 6)), tools=0.55, text_weight=0.1),
}


class Shards:
    """The rows of one phase, in order, memory-mapped. Shards that are written later are found when they are needed."""

    def __init__(self, folder: Path, phase: str) -> None:
        self.folder, self.phase = folder, phase
        self.maps: list[tuple[Tokens, Weights]] = []

    def _find(self) -> None:
        paths = sorted(self.folder.glob(f"{self.phase}-*.tokens.npy"))
        for path in paths[len(self.maps) :]:
            weights = Path(str(path).replace(".tokens.", ".weights."))
            self.maps.append((np.load(path, mmap_mode="r"), np.load(weights, mmap_mode="r")))

    def rows(self, start: int, count: int) -> tuple[Tokens, Weights]:
        """Return `count` rows from `start` on. After the last shard it begins again."""
        if start + count > sum(len(tokens) for tokens, _ in self.maps):
            self._find()
        total = sum(len(tokens) for tokens, _ in self.maps)
        if not total:
            raise FileNotFoundError(f"no shards of phase {self.phase!r} in {self.folder}")
        picked = [self._row((start + offset) % total) for offset in range(count)]
        return np.stack([tokens for tokens, _ in picked]), np.stack([weights for _, weights in picked])

    def _row(self, index: int) -> tuple[Tokens, Weights]:
        for tokens, weights in self.maps:
            if index < len(tokens):
                return tokens[index], weights[index]
            index -= len(tokens)
        raise IndexError(index)


class Encoder:
    def __init__(self, work: Path, text_weight: float = 1.0) -> None:
        self.text_weight = text_weight
        self.tokenizer: Any = Tokenizer.from_file(str(tokenizer_step.path(work)))
        self.bos = SPECIAL_TOKENS.index(BOS)

    def text(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def conversation(self, conversation: Conversation) -> Encoded:
        """Encode a conversation. Returns token ids, and weights in units of 1 / UNIT."""
        ids: list[int] = []
        weights: list[int] = []
        for text, weight in conversation.segments():
            part = self.tokenizer.encode(text, add_special_tokens=False)
            is_answer = weight == ANSWER_WEIGHT
            own = [round(weight * UNIT * (1.0 if is_answer else self.text_weight))] * len(part.ids)
            if is_answer:
                for position in _choosing(text, part.offsets):
                    own[position] = round(conversation.choice_weight * UNIT)
            ids += part.ids
            weights += own
        return ids, weights


def _choosing(answer: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Return the positions of the tokens that choose the answer."""
    spans = choices(answer)
    if spans is None:
        return list(range(len(offsets)))[:CHOICE_TOKENS]
    return [i for i, (start, end) in enumerate(offsets) if any(start < last and first < end for first, last in spans)]


def plain_stream(corpus: Corpus, encoder: Encoder, rng: Random) -> Iterator[int]:
    """Yield tokens of all pages for ever, each source by its weight, in a new order every round."""
    share = {source.name: source.weight for source in SOURCES}
    while True:
        for page in rng.sample(corpus.pages, len(corpus.pages)):
            is_dry = "c-api" in page.name or "whatsnew" in page.name
            if rng.random() < share[page.source] * (0.5 if is_dry else 1):
                yield encoder.bos
                yield from encoder.text(page.text)


def _take(stream: Iterator[int], count: int) -> list[int]:
    return [next(stream) for _ in range(count)]


class Packer:
    """Fills rows with whole examples, and the rest of a row with plain text."""

    def __init__(self, draw: Callable[[], Conversation | None], encoder: Encoder, plain: Iterator[int]) -> None:
        self.draw, self.encoder, self.plain = draw, encoder, plain
        self.waiting: list[Encoded] = []

    def _refill(self, length: int) -> None:
        while len(self.waiting) < _WAITING:
            conversation = self.draw()
            if conversation is not None:
                encoded = self.encoder.conversation(conversation)
                if len(encoded[0]) <= length:
                    self.waiting.append(encoded)

    def row(self, length: int) -> Encoded:
        self._refill(length)
        ids, weights = self.waiting.pop(0)
        while fitting := [e for e in self.waiting if len(e[0]) <= length - len(ids)]:
            best = max(fitting, key=lambda encoded: len(encoded[0]))
            self.waiting.remove(best)
            ids, weights = ids + best[0], weights + best[1]
        gap, unit = length - len(ids), round(UNIT * self.encoder.text_weight)
        if gap >= _LEAST_FILL:
            return [*ids, self.encoder.bos, *_take(self.plain, gap - 1)], [*weights, 0, *[unit] * (gap - 1)]
        return ids + [0] * gap, weights + [0] * gap


class Writer:
    """Writes the shards of one phase."""

    def __init__(self, phase: str, length: int, seed: int, corpus: Corpus, encoder: Encoder) -> None:
        self.phase, self.length, self.rng = phase, length, Random(seed)
        self.mix = MIXES[phase]
        self.plain = plain_stream(corpus, encoder, self.rng)
        paragraphs = [text for page in corpus.pages if page.source != "scipy" for text in page.paragraphs]
        rag = RagExamples(corpus.facts, paragraphs, self.rng)
        chat = ChatExamples(corpus.facts, self.rng)
        self.rag = Packer(lambda: rag.draw(self.mix.rag), encoder, self.plain)
        self.chat = Packer(chat.draw, encoder, self.plain)
        other = RagMix(0.6, 0.1, (1, 1, 2), (1, 2, 3))
        tools = ToolExamples(self.rng, lambda: chat.draw() if self.rng.random() < 0.5 else rag.draw(other))
        self.tools = Packer(tools.draw, encoder, self.plain)

    def _row(self) -> Encoded:
        x = self.rng.random()
        if x < self.mix.plain:
            return _take(self.plain, self.length + 1), [round(UNIT * self.mix.text_weight)] * (self.length + 1)
        if x < self.mix.plain + self.mix.chat:
            return self.chat.row(self.length + 1)
        return (self.tools if x > 1 - self.mix.tools else self.rag).row(self.length + 1)

    def write(self, folder: Path, number: int, rows: int) -> None:
        pairs = [self._row() for _ in tqdm(range(rows), desc=f"{self.phase} {number}", mininterval=5)]
        stem = folder / f"{self.phase}-{number:03}"
        np.save(f"{stem}.weights.npy", np.array([weights for _, weights in pairs], np.uint8))
        # Last, and by rename: a running training looks for these files.
        unfinished = folder / "unfinished.npy"
        np.save(unfinished, np.array([ids for ids, _ in pairs], np.uint16))
        unfinished.replace(f"{stem}.tokens.npy")


def write_shards(work: Path, phase_name: str, rows: int, shards: int, seed: int) -> None:
    """Write shards after those that exist."""
    folder = work / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    phase = next(phase for phase in (*PHASES, FINE_TUNING) if phase.name == phase_name)
    first = len(list(folder.glob(f"{phase.name}-*.tokens.npy")))
    writer = Writer(phase.name, phase.length, seed + first, load(work), Encoder(work, MIXES[phase.name].text_weight))
    for number in range(first, first + shards):
        writer.write(folder, number, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=[phase.name for phase in (*PHASES, FINE_TUNING)])
    parser.add_argument("--work", type=Path, default=WORK, help="folder with the corpus and tokenizer.json")
    parser.add_argument("--rows", type=int, default=4000, help="rows in a shard")
    parser.add_argument("--shards", type=int, default=1, help="shards to add to those that exist")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    write_shards(options.work, options.phase, options.rows, options.shards, options.seed)


if __name__ == "__main__":
    main()
