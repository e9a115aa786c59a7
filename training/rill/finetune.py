"""Step 7: teaches an exported model to call tools, on the shards of `dataset tools`.

One process of one thread runs a fixed number of steps, so that the same shards on the same processor give the same
bits, however busy the machine is. A run that is started again resumes from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tqdm import trange

from training.rill.corpus import WORK
from training.rill.dataset import UNIT, Shards
from training.rill.export import TARGET
from training.rill.model import Rill, Shape, weighted_loss
from training.rill.optim import Optimizer, Rates
from training.rill.schedule import FINE_TUNING, WARM_UP_STEPS


@dataclass(frozen=True, slots=True)
class TuningOptions:
    work: Path
    model: Path
    steps: int
    rate: float
    save_every_s: float


def checkpoint_path(work: Path) -> Path:
    return work / "fine-tuned.pt"


def rate_scale(step: int, options: TuningOptions) -> float:
    """Return the learning rate's factor: a warm-up, then linear to a hundredth of `rate`."""
    decay = max(0.01, 1 - step / options.steps)
    return options.rate * min(1.0, (step + 1) / WARM_UP_STEPS) * decay


class Tuning:
    def __init__(self, options: TuningOptions) -> None:
        self.options = options
        self.model = Rill(Shape())
        self.model.load_state_dict({n: t.float() for n, t in load_file(options.model / "model.safetensors").items()})
        self.parameters = list(self.model.parameters())
        self.optimizer = Optimizer(self.model, Rates())
        self.loss: Any = torch.compile(weighted_loss, dynamic=False)
        self.shards = Shards(options.work / "shards", FINE_TUNING.name)
        self.done = 0

    def resume(self) -> None:
        saved = torch.load(checkpoint_path(self.options.work), weights_only=True)
        self.model.load_state_dict(saved["model"])
        for mine, theirs in zip(self.optimizer.state, saved["optimizer"], strict=True):
            for tensor, value in zip(mine, theirs, strict=True):
                tensor.copy_(value)
        self.done = saved["step"]

    def save(self) -> None:
        path = checkpoint_path(self.options.work)
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state, "step": self.done}
        torch.save(content, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def step(self) -> float:
        """Run one step. Returns the mean loss."""
        total = 0.0
        for parameter in self.parameters:
            parameter.grad = None
        for micro_batch in range(FINE_TUNING.micro_batches):
            first = self.done * FINE_TUNING.rows_per_step + micro_batch * FINE_TUNING.rows
            tokens, weights = self.shards.rows(first, FINE_TUNING.rows)
            ids = torch.from_numpy(tokens.astype(np.int64))
            share = torch.from_numpy(weights.astype(np.float32)) / UNIT
            loss = self.loss(self.model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), share[:, 1:].contiguous())
            loss.backward()
            total += float(loss.item())
        scale = rate_scale(self.done, self.options)
        self.done += 1
        for index, parameter in enumerate(self.parameters):
            assert parameter.grad is not None
            self.optimizer.update(index, parameter.grad / FINE_TUNING.micro_batches, self.done, scale)
        return total / FINE_TUNING.micro_batches


def finetune(options: TuningOptions) -> None:
    torch.set_num_threads(1)
    run = Tuning(options)
    if checkpoint_path(options.work).exists():
        run.resume()
    saved_at, mean = time.monotonic(), 0.0
    with (options.work / "finetune.jsonl").open("a", buffering=1) as log:
        for step in trange(run.done, options.steps, mininterval=10):
            loss = run.step()
            mean = 0.95 * mean + 0.05 * loss if mean else loss
            if step % 20 == 0:
                print(json.dumps({"step": step, "loss": round(mean, 4), "time": round(time.time())}), file=log)
            if time.monotonic() - saved_at > options.save_every_s:
                run.save()
                saved_at = time.monotonic()
    run.save()


def parse() -> TuningOptions:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=WORK, help="folder with shards/; the checkpoint goes there")
    parser.add_argument("--model", type=Path, default=TARGET, help="exported folder to start from")
    parser.add_argument("--steps", type=int, default=3000, help="steps of the whole run")
    parser.add_argument("--rate", type=float, default=0.14, help="largest learning rate, as a share of that of `train`")
    parser.add_argument("--save-every-s", type=float, default=180.0, help="seconds between checkpoints")
    return TuningOptions(**vars(parser.parse_args()))


if __name__ == "__main__":
    finetune(parse())
