"""transformers' continuous batching beside our executor: the same shape, device and requests."""

import time
from typing import Any

import torch

from benchmarks.gpu.executor import BLOCK_SIZE, run_batch
from benchmarks.gpu.models import config_for, random_runner
from benchmarks.gpu.parts import Notes, Setting, Skipped
from benchmarks.gpu.shapes import folder_of, large


def measure(setting: Setting, notes: Notes) -> None:
    count, prompt, output = (3, 20, 6) if setting.is_tiny else (256, 512, 128)
    shape, name = large(setting), f"8B, {count} x ({prompt} + {output})"
    theirs = _theirs(setting, count, prompt, output)
    notes.note(name, transformers_tokens_per_s=theirs)
    num_blocks = count * -(-(prompt + output) // BLOCK_SIZE)
    limits = {"max_num_seqs": count, "max_num_batched_tokens": 2048, "num_blocks": num_blocks}
    with random_runner(setting, shape, limits) as runner:
        ours = run_batch(runner, config_for(setting, "", **limits), [(prompt, output)] * count).tokens_per_s
    notes.note(name, tokens_per_s=ours, of_transformers=ours / theirs)


def _theirs(setting: Setting, count: int, prompt: int, output: int) -> float:
    """Return transformers' tokens/s, in the second of two batches: the first compiles and captures."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder_of(large(setting), setting))
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if not hasattr(model, "generate_batch"):
        raise Skipped("this transformers has no generate_batch")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(6, 4000, (count, prompt), generator=generator).tolist()
    options = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1)
    for _ in range(2):
        began = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=options, **_cache_options(setting))
        seconds = time.perf_counter() - began
    num_tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    assert num_tokens == count * output, f"{num_tokens} tokens of {count * output}"
    del model
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    return num_tokens / seconds


def _cache_options(setting: Setting) -> dict[str, Any]:
    """On a GPU transformers chooses its cache by itself. For a small model it would take all memory of the machine."""
    if not setting.is_tiny:
        return {}
    from transformers import ContinuousBatchingConfig

    return {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128)}
