from pathlib import Path

import pytest

from pipelines.text.tokenizer import Tokenizer

RILL = Path(__file__).parents[1] / "data" / "tokenizers" / "rill"
"""The text side of the bundled model: byte-level BPE of 4096 tokens, and a chat template."""


@pytest.fixture(scope="session")
def rill_path() -> Path:
    return RILL


@pytest.fixture(scope="session")
def rill() -> Tokenizer:
    return Tokenizer.load(RILL)
