"""Where the repository and the data of its tests lie."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DATA = TESTS / "data"
"""Files that tests read: goldens, configurations, models, recorded exchanges."""
MODELS = ROOT / "models"
"""The bundled model repository."""
DOCS = ROOT / "docs"
RILL_TOKENIZER = DATA / "tokenizers" / "rill"
"""The text side of the bundled model: byte-level BPE of 4096 tokens, and a chat template."""
