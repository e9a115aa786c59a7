"""Loads a model of arrays: what is the same for each library."""

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend, BackendContext
from serving.backends.arrays.agreement import check_agreement
from serving.backends.arrays.batch import BatchForm
from serving.backends.arrays.batch_tensors import batch_tensors_of
from serving.backends.arrays.completion import complete_config, default_max_batch_size, needs_completion
from serving.backends.arrays.heap import give_back_freed_memory
from serving.backends.arrays.instance import ArrayInstance
from serving.backends.arrays.session import ArraySession
from serving.backends.arrays.signature import Signature
from serving.batching.scheduled_model import ScheduledModel
from serving.instance import HostPolicy, Placement, choose_host_policy, place_instances
from serving.model import Model
from serving.spec import ModelSource, build_spec, read_labels
from sluice.errors import SluiceError


class _Place(NamedTuple):
    """Where instances share a session: a device, and what they keep to on the host."""

    gpu: int | None
    policy: HostPolicy | None


class ArrayBackend(Backend):
    """One session for each place that instances are at."""

    supported_fields = frozenset({"batch_input", "batch_output", "instance_group.host_policy"})

    def num_gpus(self) -> int:
        """How many the library can use. Called on a thread."""
        return 0

    @abstractmethod
    def read_signature(self, source: ModelSource) -> Signature:
        """Open the model without what takes time and changes no signature. Called on a thread."""

    @abstractmethod
    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> ArraySession:
        """For the instances of `placements`, which are on one device.

        Called on a thread that keeps to `policy`, as threads that the library starts in it do.
        """

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        config = ModelConfig()
        config.CopyFrom(source.config)
        if needs_completion(config):
            signature = await asyncio.to_thread(self.read_signature, source)
            complete_config(config, signature, default_max_batch_size(context.backend_options, self.name))
        return config

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Raises SluiceError INVALID where the configuration contradicts the model, else with the library's reason."""
        config, spec = source.config, build_spec(source.config, source.version)
        batch_tensors = batch_tensors_of(config)
        placements = place_instances(config, await asyncio.to_thread(self.num_gpus))
        places = [_Place(each.gpu, choose_host_policy(each, context.host_policies)) for each in placements]
        labels = await asyncio.to_thread(read_labels, config, source.folder)
        sessions = await asyncio.to_thread(self._open_sessions, source, placements, places)
        try:
            for session in sessions.values():
                check_agreement(config, spec, session.signature)
        except SluiceError:
            await asyncio.to_thread(_close, sessions.values())
            raise
        instances = [
            ArrayInstance(each, sessions[place], BatchForm(spec, sessions[place], batch_tensors), place.policy)
            for each, place in zip(placements, places, strict=True)
        ]
        return ScheduledModel(source, instances, labels, context)

    def _open_sessions(
        self, source: ModelSource, placements: Sequence[Placement], places: Sequence[_Place]
    ) -> dict[_Place, ArraySession]:
        together: dict[_Place, list[Placement]] = {}
        for each, place in zip(placements, places, strict=True):
            together.setdefault(place, []).append(each)
        try:
            return {place: self._open_session(source, each, place.policy) for place, each in together.items()}
        finally:
            give_back_freed_memory()

    def _open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> ArraySession:
        if policy is None:
            return self.open_session(source, placements, None)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(policy.bind).result()
            return thread.submit(self.open_session, source, placements, policy).result()


def _close(sessions: Iterable[ArraySession]) -> None:
    for session in sessions:
        session.close()
    give_back_freed_memory()
