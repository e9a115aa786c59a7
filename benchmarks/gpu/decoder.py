"""Steps of an 8B with random weights: from a batch on the host to greedy tokens on the host."""

from benchmarks.gpu.models import random_runner, step_s
from benchmarks.gpu.parts import Notes, Setting
from benchmarks.gpu.shapes import large, share_of_limit

DECODES = ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 128), (256, 1024))
PROMPTS = (512, 2048, 8192)
BLOCK_SIZE = 32


def measure(setting: Setting, notes: Notes) -> None:
    decodes, prompts = (((1, 40), (3, 40)), (70,)) if setting.is_tiny else (DECODES, PROMPTS)
    num_blocks = max(batch * -(-(context + 1) // BLOCK_SIZE) for batch, context in decodes)
    limits = {
        "num_blocks": max(num_blocks, max(prompts) // BLOCK_SIZE + 1),
        "max_num_seqs": max(batch for batch, _ in decodes),
        "max_num_batched_tokens": max(prompts),
    }
    for graphs in (True, False):
        with random_runner(setting, large(setting), limits, graphs=graphs) as runner:
            for batch, context in decodes:
                seconds = step_s(runner, [context - 1] * batch, [1] * batch, 5 if setting.is_tiny else 20)
                _note_decode(setting, notes, batch, context, seconds, graphs=graphs)
            for length in prompts if graphs else ():
                _note_prefill(setting, notes, length, step_s(runner, [0], [length], 5))


def _note_decode(setting: Setting, notes: Notes, batch: int, context: int, seconds: float, *, graphs: bool) -> None:
    name = f"decode {batch} x {context}"
    if not graphs:
        notes.note(name, without_graphs_ms=seconds * 1e3)
        return
    share = share_of_limit(setting, seconds, lambda ceilings: ceilings.decode_s(large(setting), batch, context))
    notes.note(name, ms=seconds * 1e3, tokens_per_s=batch / seconds, **share)


def _note_prefill(setting: Setting, notes: Notes, length: int, seconds: float) -> None:
    share = share_of_limit(setting, seconds, lambda ceilings: ceilings.prefill_s(large(setting), length))
    notes.note(f"prefill {length}", ms=seconds * 1e3, tokens_per_s=length / seconds, **share)
