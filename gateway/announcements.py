"""The lines on standard output with which a server says where it listens and what it serves."""

import logging
import os
import sys
from typing import TYPE_CHECKING

from sluice.serving.repository.managed_model import ModelState

if TYPE_CHECKING:  # imported for real while the engine loads
    from sluice.serving.repository.repository import ModelRepository

log = logging.getLogger(__name__)

MAX_NAMED_MODELS = 8
"""Most models that the ready line names."""


def describe_served(repository: "ModelRepository") -> str:
    """Describe the one language model with its limits, or name the models; and count those that are missing."""
    from sluice.pipelines.llm.model import llm_text_of  # slow to import, and done by now

    models = repository.models()
    names = sorted({model.name for model in models})
    missing = ""
    if count := sum(entry.state is ModelState.UNAVAILABLE for entry in repository.index()):
        missing = f", {count} not available (the log says why, `sluice repository check` what to write)"
    texts = [text for model in models if (text := llm_text_of(model)) is not None]
    if len(texts) == 1:
        text, info = texts[0], texts[0].info
        what = f"{info.model_type}, {info.dtype}, context {info.max_model_len} tokens"
        beside = f" and {len(names) - 1} models beside it" if len(names) > 1 else ""
        return f"{text.name} ({what}; KV cache {info.capacity_blocks * info.block_size} tokens){beside}{missing}"
    shown = ", ".join(names[:MAX_NAMED_MODELS]) + (", ..." if len(names) > MAX_NAMED_MODELS else "")
    return f"{len(names)} models ({shown}){missing}" if names else f"no models yet{missing}"


def print_line(line: str) -> None:
    """Print a line for the operator. Scripts read the addresses from it. A full disk or a closed pipe stops nothing."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("standard output takes no lines (%s): %s", error, line)
        # What could not be written is still buffered, and the interpreter would fail to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
