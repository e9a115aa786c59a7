"""Makes the small checkpoints under tests/data/checkpoints, and records what transformers generates from them.

`make goldens` runs it in an environment with torch and transformers. The result is checked in, so that the tests need
neither.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from tests.goldens.models import (
    TINY_LLAMA,
    TINY_QWEN3,
    generate_greedily,
    load_checkpoint,
    random_model,
    save_checkpoint,
)

DATA = Path(__file__).parents[1] / "data"
NUM_CASES = 32
LEAST_MARGIN = 1e-3
"""Float32 sums in another order differ by some 1e-5. A token that wins by less than this proves nothing."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One checkpoint to make."""

    name: str
    config: PretrainedConfig
    seed: int
    dtype: torch.dtype
    eos_token_id: int | list[int]


RECORDINGS = (
    Recording("llama_tiny", TINY_LLAMA, seed=5, dtype=torch.bfloat16, eos_token_id=[2, 7]),
    Recording("qwen3_tiny", TINY_QWEN3, seed=6, dtype=torch.float32, eos_token_id=2),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and its greedy continuation."""

    prompt_token_ids: list[int]
    max_tokens: int
    repetition_penalty: float
    token_ids: list[int]
    margin: float


def record(recording: Recording) -> None:
    """Write one checkpoint and its goldens. Raises ValueError where a token wins too narrowly: take another seed."""
    directory = DATA / "checkpoints" / recording.name
    model = random_model(recording.config, recording.seed, recording.dtype)
    save_checkpoint(model, directory, recording.eos_token_id)
    cases = record_cases(load_checkpoint(directory), recording.seed)
    margin = min(case.margin for case in cases)
    if margin < LEAST_MARGIN:
        raise ValueError(f"{recording.name}: a token wins by {margin:.1e}, less than {LEAST_MARGIN}")
    head = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32", "margin": margin}
    _write_goldens(DATA / "goldens" / f"{recording.name}.json", head, cases)


def _write_goldens(path: Path, head: dict[str, str | float], cases: list[Case]) -> None:
    """Write one JSON object with a case on each line, so that a changed case is a changed line."""
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(case)) for case in cases)
    path.write_text(json.dumps(head)[:-1] + f', "cases": [\n{lines}\n]}}\n')


def record_cases(model: PreTrainedModel, seed: int) -> list[Case]:
    """Record prompts of 1 to 200 tokens and outputs of 1 to 64, every fourth with a repetition penalty."""
    generator = np.random.default_rng(seed)
    lengths = [1, 2, 31, 32, 33, 200, *generator.integers(1, 201, NUM_CASES - 6).tolist()]
    cases = []
    for index, length in enumerate(lengths):
        prompt = generator.integers(3, model.config.vocab_size, length).tolist()
        max_tokens = 64 if index < 6 else int(generator.integers(1, 65))
        penalty = 1.3 if index % 4 == 3 else 1.0
        result = generate_greedily(model, prompt, max_tokens, penalty)
        cases.append(Case(prompt, max_tokens, penalty, result.token_ids, result.margin))
    return cases


if __name__ == "__main__":
    for recording in RECORDINGS:
        record(recording)
