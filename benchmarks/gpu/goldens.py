"""The recorded tokens of all model families on the device, in float32 and bfloat16, with CUDA graphs and without."""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.gpu.models import config_for, load_torch
from benchmarks.gpu.parts import Notes, Setting
from tests.engine.runners.drive import Driver, Prompt, prefill
from tests.engine.runners.family_goldens import NAMES, FamilyGolden, read_family
from tests.goldens.checkpoints import write_checkpoint

SETTINGS = (("f32", True), ("f32", False), ("bf16", True))
"""Types, each with graphs or without."""
EXACT = "f32"
"""The type in which tokens must be those of transformers. In the other, near ties of two logits decide otherwise."""


class WrongTokens(Exception):
    """Families whose tokens are not the recorded ones in float32."""


def measure(setting: Setting, notes: Notes) -> None:
    inexact: set[str] = set()
    with tempfile.TemporaryDirectory(dir=setting.work) as folder:
        for dtype, graphs in SETTINGS:
            differing = _measure_all(setting, notes, Path(folder), dtype, graphs=graphs)
            inexact |= {*differing} if dtype == EXACT else set()
    if inexact:
        raise WrongTokens(f"{len(inexact)} families in {EXACT}: {', '.join(sorted(inexact))}")


def _measure_all(setting: Setting, notes: Notes, folder: Path, dtype: str, *, graphs: bool) -> list[str]:
    """Return the families whose tokens are not the recorded ones."""
    names = NAMES[:: len(NAMES) // 3] if setting.is_tiny and setting.device == "cpu" else NAMES
    title = f"{dtype}, {'with' if graphs else 'without'} graphs"
    differing, largest = [], 0.0
    for number, name in enumerate(names, 1):
        golden, checkpoint = read_family(name), folder / name
        if not checkpoint.is_dir():
            write_checkpoint(golden.blueprint, checkpoint)
        is_equal, difference = _compare(setting, golden, checkpoint, dtype, graphs=graphs)
        differing += [] if is_equal else [name]
        largest = max(largest, difference)
        notes.note(title, families=number, differing=", ".join(differing), largest_difference=largest)
    return differing


def _compare(
    setting: Setting, golden: FamilyGolden, checkpoint: Path, dtype: str, *, graphs: bool
) -> tuple[bool, float]:
    """Return whether all tokens are the recorded ones, and the largest difference of a logit, as a share of logits."""
    config = config_for(
        setting,
        checkpoint,
        dtype=dtype,
        num_blocks=40,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=golden.max_model_len,
        runtime_settings={"graphs": "true" if graphs else "false"},
    )
    with load_torch(config) as runner:
        prompt = golden.cases[-1].prompt_token_ids
        logits = prefill(runner, prompt, sampled_rows=[len(prompt) // 2, len(prompt) - 1])
        expected = np.array(golden.logits, np.float32)
        difference = float(np.abs(logits - expected).max() / np.abs(expected).max())
        prompts = [
            Prompt(case.prompt_token_ids, case.max_tokens, first_step=2 * i) for i, case in enumerate(golden.cases)
        ]
        tokens = Driver(runner, chunk_sizes=(7, 30, 50), seed=4).generate(prompts)
    return tokens == [case.token_ids for case in golden.cases], difference
