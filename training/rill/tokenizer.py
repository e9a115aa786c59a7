"""Step 2: trains a byte-level BPE tokenizer. Digits stay single, so that any number can be copied."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.rill.conversation import SPECIAL_TOKENS
from training.rill.corpus import WORK, Corpus, load
from training.rill.model import Shape
from training.rill.pairs_chat import ChatExamples
from training.rill.sources import SOURCES


def path(work: Path) -> Path:
    return work / "tokenizer.json"


def _texts(corpus: Corpus, rng: Random) -> Iterator[str]:
    """Yield pages by their weight, and chat, so that its words become short too."""
    weights = {source.name: source.weight for source in SOURCES}
    for page in corpus.pages:
        if rng.random() < weights[page.source]:
            yield page.text
    chat = ChatExamples(corpus.facts, rng)
    for _ in range(5000):
        yield from (text for turn in chat.draw().turns for text in turn)


def train(work: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=Shape().vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_texts(load(work), Random(0)), trainer)
    tokenizer.save(str(path(work)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="folder with pages.jsonl and facts.jsonl")
    train(parser.parse_args().work)


if __name__ == "__main__":
    main()
