"""Where the repository and the data of its tests lie."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DATA = TESTS / "data"
"""Files that tests read: goldens, configurations, models, recorded exchanges."""
MODELS = ROOT / "models"
"""The bundled model repository."""
DOCS = ROOT / "docs"
CERTIFICATES = TESTS / "gateway" / "api" / "v2" / "grpc" / "certificates"
"""Of a server and of a client, and of the authority that signed both."""
VLLM_PYTHON = ROOT / "build" / "vllm-venv" / "bin" / "python"
"""The Python of the environment that `make test-vllm` makes."""
DYNAMO_BIN = ROOT / "build" / "dynamo-venv" / "bin"
"""The programs of the environment that `make test-dynamo` makes."""
RILL_TOKENIZER = DATA / "tokenizers" / "rill"
"""The text side of the bundled model: byte-level BPE of 4096 tokens, and a chat template."""
