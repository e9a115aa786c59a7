"""Step 4: trains on the shards. A run that is started again resumes from its checkpoint.

Worker processes share the parameters, draw micro-batches from one counter (a slow core does fewer), and each update a
part of the parameters. The schedule follows trained time, not steps, so that it ends on time on any machine. A step
counts at most `--step-cap-s`, so that a suspended or busy machine costs wall time but no training.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor
from tqdm import tqdm

from training.rill.corpus import WORK
from training.rill.dataset import UNIT, Shards
from training.rill.model import Rill, Shape, count_parameters, weighted_loss
from training.rill.optim import Optimizer, Rates
from training.rill.schedule import PHASES, Phase, phase_at, rate_scale

_LOSS, _PROGRESS, _STOP = range(3)  # cells of `Run.board`


@dataclass(frozen=True, slots=True)
class Options:
    work: Path
    minutes: float
    workers: int
    step_cap_s: float
    save_every_s: float
    seed: int


@dataclass
class Position:
    """The position of a run, which a checkpoint has besides tensors.

    Nothing is random after the start: shards fix the order, so that the row counts are the whole state of the data.
    """

    step: int = 0
    tokens: int = 0
    trained_s: float = 0.0
    progress: float = 0.0
    rows: list[int] | None = None

    def advance(self, phase: int, seconds: float, budget_s: float) -> None:
        self.step += 1
        self.tokens += PHASES[phase].rows_per_step * PHASES[phase].length
        self.trained_s += seconds
        self.progress += seconds / budget_s
        rows = self.rows or [0] * len(PHASES)
        rows[phase] += PHASES[phase].rows_per_step
        self.rows = rows

    def row(self, phase: int) -> int:
        return self.rows[phase] if self.rows else 0


@dataclass
class Run:
    """The state that the workers share."""

    model: Rill
    optimizer: Optimizer
    gradients: list[list[Tensor]]
    board: Tensor
    counter: Any
    barrier: Any
    position: Position


def checkpoint_path(work: Path) -> Path:
    return work / "checkpoint.pt"


def save(run: Run, path: Path) -> None:
    """Write a checkpoint and rename it, so that a reader sees the old one or the new one."""
    content = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state,
        "position": asdict(run.position),
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(content, unfinished)
    unfinished.replace(path)


def prepare(options: Options) -> Run:
    """Return a new run, or the run of the checkpoint."""
    torch.manual_seed(options.seed)
    model = Rill(Shape()).share_memory()
    optimizer = Optimizer(model, Rates())
    position = Position()
    if checkpoint_path(options.work).exists():
        saved = torch.load(checkpoint_path(options.work), weights_only=True)
        model.load_state_dict(saved["model"])
        for mine, theirs in zip(optimizer.state, saved["optimizer"], strict=True):
            for tensor, value in zip(mine, theirs, strict=True):
                tensor.copy_(value)
        position = Position(**saved["position"])
    context = mp.get_context("spawn")
    return Run(
        model=model,
        optimizer=optimizer,
        gradients=[[torch.zeros_like(p).share_memory_() for p in model.parameters()] for _ in range(options.workers)],
        board=torch.zeros(3, dtype=torch.float64).share_memory_(),
        counter=context.Value("i", 0),
        barrier=context.Barrier(options.workers),
        position=position,
    )


class Worker:
    def __init__(self, rank: int, run: Run, options: Options) -> None:
        torch.set_num_threads(1)
        self.rank, self.run, self.options = rank, run, options
        self.position = run.position
        self.parameters = list(run.model.parameters())
        self.mine = run.optimizer.share(rank, options.workers)
        self.loss = torch.compile(weighted_loss, dynamic=False)
        self.shards = [Shards(options.work / "shards", phase.name) for phase in PHASES]

    def _backward(self, phase: int, micro_batch: int) -> float:
        rows = PHASES[phase].rows
        start = self.position.row(phase) + micro_batch * rows
        tokens, weights = self.shards[phase].rows(start, rows)
        ids = torch.from_numpy(tokens.astype(np.int64))
        share = torch.from_numpy(weights.astype(np.float32)) / UNIT
        loss = self.loss(self.run.model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), share[:, 1:].contiguous())
        loss.backward()
        return float(loss.item())

    def _accumulate(self, phase: int) -> None:
        """Compute micro-batches until none is left, then publish the sum of their gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        loss = 0.0
        while (micro_batch := self._next()) < PHASES[phase].micro_batches:
            loss += self._backward(phase, micro_batch)
        for parameter, shared in zip(self.parameters, self.run.gradients[self.rank], strict=True):
            if parameter.grad is None:
                shared.zero_()
            else:
                shared.copy_(parameter.grad)
        with self.run.counter.get_lock():
            self.run.board[_LOSS] += loss

    def _next(self) -> int:
        with self.run.counter.get_lock():
            self.run.counter.value += 1
            return int(self.run.counter.value) - 1

    def _update(self, phase: Phase) -> None:
        scale = rate_scale(self.position.step + 1, self.position.progress)
        for index in self.mine:
            gradient = sum(worker[index] for worker in self.run.gradients) / phase.micro_batches
            self.run.optimizer.update(index, gradient, self.position.step + 1, scale)

    def step(self) -> tuple[int, float]:
        """Run one optimizer step. Returns its phase and the mean loss."""
        phase = phase_at(self.position.progress)
        if self.rank == 0:
            self.run.board[_LOSS] = self.run.counter.value = 0
        self.run.barrier.wait()
        self._accumulate(phase)
        self.run.barrier.wait()
        self._update(PHASES[phase])
        self.run.barrier.wait()
        return phase, float(self.run.board[_LOSS]) / PHASES[phase].micro_batches

    def agree_on_time(self, seconds: float) -> float:
        """Return the step's seconds by rank 0's clock for all workers, so that they change the phase together."""
        if self.rank == 0:
            self.run.board[_PROGRESS] = min(seconds, self.options.step_cap_s)
        self.run.barrier.wait()
        return float(self.run.board[_PROGRESS])

    def train(self) -> None:
        budget_s = self.options.minutes * 60
        report = Report(self.run, self.options) if self.rank == 0 else None
        while self.position.progress < 1 and not self._must_stop():
            began = time.monotonic()
            phase, loss = self.step()
            seconds = self.agree_on_time(time.monotonic() - began)
            self.position.advance(phase, seconds, budget_s)
            if report:
                report.step(phase, loss, seconds)
        if report:
            report.finish()

    def _must_stop(self) -> bool:
        # Read between two barriers, or one worker could stop while the other waits for ever.
        self.run.barrier.wait()
        must_stop = bool(self.run.board[_STOP])
        self.run.barrier.wait()
        return must_stop


class Report:
    """Writes the progress bar, log lines and checkpoints. Only rank 0 has one."""

    def __init__(self, run: Run, options: Options) -> None:
        self.run, self.options = run, options
        self.path = checkpoint_path(options.work)
        self.saved_at = time.monotonic()
        self.mean_loss = 0.0
        self.bar = tqdm(total=100, initial=run.position.progress * 100, unit="%", mininterval=10)
        self.log = (options.work / "train.jsonl").open("a", buffering=1)

    def step(self, phase: int, loss: float, seconds: float) -> None:
        position = self.run.position
        self.mean_loss = loss if not self.mean_loss else 0.95 * self.mean_loss + 0.05 * loss
        self.bar.set_postfix(phase=PHASES[phase].name, loss=f"{self.mean_loss:.3f}", refresh=False)
        self.bar.update(min(100.0, position.progress * 100) - self.bar.n)
        if position.step % 20 == 0:
            line = {**asdict(position), "phase": PHASES[phase].name, "loss": self.mean_loss, "step_s": seconds}
            print(json.dumps(line), file=self.log)
        if time.monotonic() - self.saved_at > self.options.save_every_s:
            save(self.run, self.path)
            self.saved_at = time.monotonic()

    def finish(self) -> None:
        save(self.run, self.path)
        self.bar.close()
        self.log.close()


def _work(rank: int, run: Run, options: Options) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sets the stop flag
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Worker(rank, run, options).train()


def train(options: Options) -> None:
    run = prepare(options)
    print(f"{count_parameters(run.model):,} parameters, from step {run.position.step}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.board[_STOP].fill_(1))
    workers = mp.start_processes(_work, (run, options), options.workers, join=False, start_method="spawn")
    while not workers.join():
        pass


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=WORK, help="folder with shards/; the checkpoint goes there")
    parser.add_argument("--minutes", type=float, default=80, help="trained time of the whole run; a changed "
                        "value stretches what is left when resuming")  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of one thread each")
    parser.add_argument("--step-cap-s", type=float, default=6.0, help="most seconds one step may count")
    parser.add_argument("--save-every-s", type=float, default=180.0, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse())
