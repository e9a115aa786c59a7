"""Models that several processes of one machine compute together, over gloo."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.runners.drive import continuations
from tests.engine.runners.family_goldens import FamilyGolden, read_family
from tests.engine.runners.torch.loaded import config
from tests.goldens.checkpoints import write_checkpoint

import torch  # isort: skip - `loaded` skips the module where there is none

import torch.distributed as dist  # isort: skip

from sluice.engine.runners.torch.group import RankedRunner, RankGroup, load_runner  # isort: skip
from sluice.engine.runners.torch.parallel import Meeting, Ranks, join  # isort: skip
from sluice.engine.runners.torch.runner import load_runner as load_part  # isort: skip

__all__ = ["RankGroup", "RankedRunner", "check_alone", "family_on", "group_of", "load_runner"]


@contextmanager
def group_of(size: int, **options: Any) -> Iterator[RankGroup]:
    """Processes that load one model after the other: starting them takes longer than most tests."""
    torch.set_num_threads(1)
    group = RankGroup(size, "cpu", **options)
    try:
        yield group
    finally:
        group.close()


@contextmanager
def family_on(group: RankGroup, name: str, folder: Path, **fields: Any) -> Iterator[tuple[RankedRunner, FamilyGolden]]:
    """A family's checkpoint on all ranks of the group."""
    golden = read_family(name)
    write_checkpoint(golden.blueprint, folder)
    runner = group.load(config(folder, max_model_len=golden.max_model_len, **fields))
    yield runner, golden
    runner.close()


def check_alone(name: str, folder: Path, device: str) -> None:
    """Check the tokens of a rank that is alone in its group: it exchanges with itself, over NCCL on a GPU."""
    golden = read_family(name)
    write_checkpoint(golden.blueprint, folder)
    join(Meeting(0, 1, device, str(folder / "store"), 60.0))
    try:
        own = config(folder, max_model_len=golden.max_model_len, device=device)
        runner = load_part(own, Ranks(0, 1, lambda number: number))
        assert continuations(runner, golden) == [case.token_ids for case in golden.cases]
        runner.close()
    finally:
        dist.destroy_process_group()
