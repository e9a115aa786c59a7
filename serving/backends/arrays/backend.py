"""Loads models whose library computes arrays in this process: the part that is common to all such libraries."""

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import ClassVar, NamedTuple

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.heap import trim_heap
from sluice.serving.backend import Backend, BackendContext
from sluice.serving.backends.arrays.batch import BatchAssembler, parse_batch_tensors
from sluice.serving.backends.arrays.config import (
    DEFAULT_MAX_BATCH_SIZE,
    check_config,
    complete_config,
    default_max_batch_size,
    needs_completion,
)
from sluice.serving.backends.arrays.instance import ArrayInstance, prepare_thread
from sluice.serving.backends.arrays.session import ArraySession, Signature
from sluice.serving.batching.scheduled_model import InstanceStarter, ScheduledModel
from sluice.serving.config.validation import check_tensors
from sluice.serving.instance import HostPolicy, Placement, choose_host_policy, place_instances
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource, build_spec, read_labels


class _SharedPlace(NamedTuple):
    """Place whose instances share a session: a device, and the host policy its threads follow."""

    gpu: int | None
    policy: HostPolicy | None


class ArrayBackend(Backend):
    """Base of the backends that open one session for each place that has instances."""

    supported_fields = frozenset({"batch_input", "batch_output", "instance_group.host_policy"})
    optimizes_sizes: ClassVar[bool] = False
    """Whether a session may have sizes in its signature that are open in that of `read_signature`."""

    def num_gpus(self) -> int:
        """Return the number of GPUs the library can use. Called on a thread."""
        return 0

    @abstractmethod
    def read_signature(self, source: ModelSource) -> Signature:
        """Open the model and return its signature, skipping slow steps that do not change it. Called on a thread."""

    @abstractmethod
    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> ArraySession:
        """Open a session for the instances of `placements`, which are all on one device.

        Called on a thread that is bound to `policy`, so that threads the library starts there are bound to it too.
        """

    def can_open(self, config: ModelConfig) -> bool:
        """Return whether `check` may open the model: not where that runs a library that the model brings."""
        return False

    def check_options(self, config: ModelConfig) -> None:
        """Raise SluiceError for what a session would refuse in the configuration, whatever is in the model's file."""

    def check(self, source: ModelSource) -> None:
        """Open the model without preparing it for requests, and compare it with its configuration."""
        parse_batch_tensors(source.config)
        self.check_options(source.config)
        if not self.can_open(source.config):
            return
        signature = self.read_signature(source)
        config = deepcopy(source.config)
        if needs_completion(config):
            complete_config(config, signature, DEFAULT_MAX_BATCH_SIZE)
        check_tensors(config)
        read_other = partial(self._read_optimized, source) if self.optimizes_sizes else None
        check_config(config, build_spec(config, source.version), signature, read_other)

    def _read_optimized(self, source: ModelSource) -> Signature:
        session = self.open_session(source, [Placement(source.name)], None)
        session.close()
        return session.signature

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        config = deepcopy(source.config)
        if needs_completion(config):
            signature = await asyncio.to_thread(self.read_signature, source)
            complete_config(config, signature, default_max_batch_size(context.backend_options, self.name))
        return config

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Load the model. Raises INVALID where its configuration contradicts it, else with the library's reason."""
        starter = InstanceStarter(await asyncio.to_thread(self.num_gpus), partial(self._start_instances, context))
        instances = await starter.start(source, place_instances(source.config, starter.num_gpus))
        labels = await asyncio.to_thread(read_labels, source.config, source.folder)
        return ScheduledModel(source, instances, labels, context, starter)

    async def _start_instances(
        self, context: BackendContext, source: ModelSource, placements: Sequence[Placement]
    ) -> list[ArrayInstance]:
        config, spec = source.config, build_spec(source.config, source.version)
        batch_tensors = parse_batch_tensors(config)
        places = [_SharedPlace(each.gpu, choose_host_policy(each, context.host_policies)) for each in placements]
        sessions = await asyncio.to_thread(self._open_sessions, source, placements, places)
        try:
            read_other = partial(self.read_signature, source) if self.optimizes_sizes else None
            for session in sessions.values():
                await asyncio.to_thread(check_config, config, spec, session.signature, read_other)
        except SluiceError:
            await asyncio.to_thread(_close_sessions, sessions.values())
            raise
        assemblers = {place: BatchAssembler(spec, session, batch_tensors) for place, session in sessions.items()}
        return [
            ArrayInstance(each, sessions[place], assemblers[place], place.policy, context.loop_turn)
            for each, place in zip(placements, places, strict=True)
        ]

    def _open_sessions(
        self, source: ModelSource, placements: Sequence[Placement], places: Sequence[_SharedPlace]
    ) -> dict[_SharedPlace, ArraySession]:
        by_place: dict[_SharedPlace, list[Placement]] = {}
        for each, place in zip(placements, places, strict=True):
            by_place.setdefault(place, []).append(each)
        try:
            return {place: self._open_session(source, each, place.policy) for place, each in by_place.items()}
        finally:
            trim_heap()

    def _open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> ArraySession:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(prepare_thread, placements[0], policy).result()
            return thread.submit(self.open_session, source, placements, policy).result()


def _close_sessions(sessions: Iterable[ArraySession]) -> None:
    for session in sessions:
        session.close()
    trim_heap()
