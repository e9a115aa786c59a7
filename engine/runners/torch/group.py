"""Rank 0 of a model that several processes of one machine compute together. It has the schedule and the sampler, starts
the other ranks, and sends them each step. If one ends or hangs, all do: the engine is replaced as after any crash."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from sluice.engine.arrays import ByteArray
from sluice.engine.config import EngineConfig
from sluice.engine.models.architectures import read_decoder_config
from sluice.engine.runners.base import Logits, Runner, StepBatch
from sluice.engine.runners.torch import runner
from sluice.engine.runners.torch.device import choose_device
from sluice.engine.runners.torch.followers import (
    TIMEOUT_S,
    Follower,
    RankTask,
    close_all,
    pack,
    pack_step,
    start_followers,
)
from sluice.engine.runners.torch.model import check_parallel
from sluice.engine.runners.torch.parallel import Meeting, Ranks, join, share_config
from sluice.errors import ErrorCode, SluiceError
from sluice.machine import num_cores
from sluice.run_folder import make_folder

logger = logging.getLogger(__name__)


def load_runner(config: EngineConfig, followers: Sequence[Follower] = ()) -> Runner:
    """Load the runner of torch on as many devices as `config` says. `followers` are the processes of its ranks, if they
    are started already. Raises SluiceError as that of one device does, and INVALID, before anything is loaded, for a
    model that so many ranks cannot share."""
    check_parallel(config)
    size = config.tensor_parallel_size
    if size == 1:
        return runner.load_runner(config)
    device = choose_device(config.device)
    share_config(read_decoder_config(Path(config.model_path)), size)
    if device.type == "cuda" and (found := torch.cuda.device_count()) < size:
        message = f"tensor_parallel_size is {size}, but torch finds {found} GPU{'s' * (found != 1)}"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param="tensor_parallel_size")
    group = RankGroup(size, device.type, followers=followers)
    try:
        return group.load(config, group.close)
    except BaseException:
        group.close()
        raise


def end_process(reason: str) -> None:
    """End this process as a crash would."""
    logger.critical("%s; the engine ends", reason)
    os._exit(1)


class RankGroup:
    """The processes of ranks 1 and up, this one having joined them."""

    def __init__(
        self,
        size: int,
        device_type: str,
        timeout_s: float = TIMEOUT_S,
        on_loss: Callable[[str], None] = end_process,
        followers: Sequence[Follower] = (),
    ) -> None:
        """Meet `followers`, or processes that are started here. `on_loss` is called, from any thread, with the reason
        why no step can be run any more. Raises UNAVAILABLE if one cannot be started."""
        self._size = size
        self._on_loss = on_loss
        self._has_joined = self._is_closing = False
        self._losing = threading.Lock()
        self._folder = make_folder("ranks")
        self._followers = followers
        meeting = Meeting(0, size, device_type, str(self._folder / "store"), timeout_s)
        try:
            self._followers = followers or start_followers(size, timeout_s)
            for each in self._followers:
                each.await_loaded()
            for each in self._followers:
                each.send(msgspec.json.encode(replace(meeting, rank=each.rank)))
            join(meeting)
            self._has_joined = True
        except BaseException:
            self.close()
            raise
        for each in self._followers:
            threading.Thread(target=self._watch, args=(each,), name=f"rank-{each.rank}-watch", daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(each.process.pid for each in self._followers)

    def load(self, config: EngineConfig, on_close: Callable[[], None] | None = None) -> "RankedRunner":
        """Load a model on all ranks. `on_close` is called after it is freed. Raises SluiceError if one fails; the group
        must be closed then."""
        config = self._share(config)
        for each in self._followers:
            each.send(pack(RankTask.LOAD))
            each.send(msgspec.json.encode(config))
        own = runner.load_runner(config, Ranks(0, self._size, self._agree))
        for each in self._followers:
            each.await_loaded()
        return RankedRunner(own, self, self._size, on_close or self._unload)

    def close(self) -> None:
        """End the processes."""
        self._is_closing = True
        close_all(self._followers)
        # NCCL would wait for the others; it ends with the process.
        if self._has_joined and dist.get_backend() == "gloo":
            dist.destroy_process_group()

    def send(self, message: bytes) -> None:
        """Send the same to all."""
        for each in self._followers:
            each.send(message)

    @contextmanager
    def together(self) -> Iterator[Sequence[Follower]]:
        """Let ranks do something that leaves them apart if it fails in one: the group is lost then."""
        try:
            yield self._followers
        except Exception as error:
            ended = next((each for each in self._followers if each.ends()), None)
            self._lose(f"a step of {self._size} ranks failed: {error}" if ended is None else self._ending(ended))
            raise

    def _share(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration of each rank. GPUs have their own memory, ranks on a CPU share cores and memory."""
        config = replace(config, tensor_parallel_size=self._size)
        if dist.get_backend() != "gloo":
            return config
        threads = num_cores() if config.num_threads is None else config.num_threads
        size = config.kv_cache_memory_bytes
        return replace(
            config,
            num_threads=min(threads, max(1, threads // self._size)),  # what is below 1 is refused as it came
            kv_cache_memory_bytes=None if size is None else size // self._size,
            memory_share=config.memory_share / self._size,
        )

    def _agree(self, number: int) -> int:
        agreed = min(number, *(each.await_loaded().num_blocks for each in self._followers))
        self.send(pack(RankTask.AGREED, [agreed]))
        return agreed

    def _unload(self) -> None:
        with suppress(OSError):  # a rank that has ended
            self.send(pack(RankTask.UNLOAD))

    def _watch(self, follower: Follower) -> None:
        follower.process.wait()
        self._lose(self._ending(follower))

    def _ending(self, follower: Follower) -> str:
        return f"rank {follower.rank} of {self._size} ended unexpectedly with code {follower.process.returncode}"

    def _lose(self, reason: str) -> None:
        """Tell once that no step can be run any more. What comes second waits, so that no request fails by it."""
        with self._losing:
            if not self._is_closing:
                self._is_closing = True
                self._on_loss(reason)


class RankedRunner(Runner):
    """A model of which each rank has a part. A block is the ranks' parts of it, in their order."""

    def __init__(self, own: runner.TorchRunner, group: RankGroup, size: int, on_close: Callable[[], None]) -> None:
        self._own = own
        self._group = group
        self._on_close = on_close
        self.info = own.info
        self.block_bytes = size * own.block_bytes
        self.block_identity = f"{own.block_identity} on {size} ranks"

    def run(self, batch: StepBatch) -> Logits:
        """See `Runner.run`."""
        with self._group.together():
            self._group.send(pack_step(batch))
            return self._own.run(batch)

    def read_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """See `Runner.read_blocks`."""
        size = self._own.block_bytes
        with self._group.together() as followers:
            self._group.send(pack(RankTask.READ, blocks))
            self._own.read_blocks(blocks, [each[:size] for each in contents])
            for follower in followers:
                for content in contents:
                    begin = follower.rank * size
                    content[begin : begin + size] = memoryview(follower.receive_block())

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[ByteArray]) -> None:
        """See `Runner.write_blocks`."""
        size = self._own.block_bytes
        with self._group.together() as followers:
            self._group.send(pack(RankTask.WRITE, blocks))
            self._own.write_blocks(blocks, [each[:size] for each in contents])
            for follower in followers:
                for content in contents:
                    begin = follower.rank * size
                    follower.send(content[begin : begin + size].data)

    def close(self) -> None:
        """Free the model on all ranks."""
        self._own.close()
        self._on_close()
