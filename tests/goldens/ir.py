"""Makes the small IR under tests/data/checkpoints/gpt2_ir, and records what transformers generates from its checkpoint.

Run it as `python -m tests.goldens.ir` in an environment with `sluice[convert]`. The result is checked in, so that the
tests do not need that environment.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.paths import DATA

NAME = "gpt2_ir"
MAX_TOKENS = 32
REPETITION_PENALTY = 1.3
PROMPT_LENGTHS = (1, 5, 31, 33, 64, 100)
FILES = ("config.json", "generation_config.json", "openvino_model.xml", "openvino_model.bin")


def main() -> None:
    """Write the IR and the goldens."""
    torch.manual_seed(0)
    model = random_gpt2()
    cases = [case(model, torch.randint(3, 256, (1, length))) for length in PROMPT_LENGTHS]
    header = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    text = json.dumps(header | {"margin": min(case["margin"] for case in cases)})[:-1]
    lines = ",\n".join(json.dumps(case) for case in cases)
    (DATA / "goldens" / f"{NAME}.json").write_text(f'{text}, "cases": [\n{lines}\n]}}\n')
    with tempfile.TemporaryDirectory() as folder:
        export(model, Path(folder))


def random_gpt2() -> transformers.GPT2LMHeadModel:
    """Make a GPT-2 with widely spread weights, so that the likeliest token wins clearly."""
    shape = {"vocab_size": 256, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=1, eos_token_id=2)).eval()
    for weights in model.parameters():
        torch.nn.init.normal_(weights, mean=float(weights.data.mean()) if weights.dim() == 1 else 0.0, std=0.12)
    return model


def case(model: transformers.GPT2LMHeadModel, prompt: torch.Tensor) -> dict[str, Any]:
    """Record the greedy continuation of a prompt [1, length]. `margin` is the least lead of a token over the next."""
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        repetition_penalty=REPETITION_PENALTY,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return {
        "prompt_token_ids": prompt[0].tolist(),
        "max_tokens": MAX_TOKENS,
        "repetition_penalty": REPETITION_PENALTY,
        "token_ids": output.sequences[0, prompt.shape[1] :].tolist(),
        "margin": min(float(scores[0].topk(2).values.diff().abs()) for scores in output.scores),
    }


def export(model: transformers.GPT2LMHeadModel, folder: Path) -> None:
    """Export the model by optimum-intel's own command."""
    model.save_pretrained(folder / "checkpoint")
    options = ["--task", "text-generation-with-past", "--disable-convert-tokenizer", "--weight-format", "fp32"]
    subprocess.run(
        ["optimum-cli", "export", "openvino", "--model", folder / "checkpoint", *options, folder / "ir"], check=True
    )
    target = DATA / "checkpoints" / NAME
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(folder / "ir" / name, target)


if __name__ == "__main__":
    main()
