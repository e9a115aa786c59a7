"""A model whose `instance_group` changes while it serves: what stays, what begins, and what ends once it is idle."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.scheduled_model import InstanceStarter, ScheduledModel
from sluice.serving.instance import Instance, Placement, place_instances
from sluice.serving.request import SequenceFlag
from sluice.serving.spec import ModelSource
from tests.serving.batching.parts import Client, HeldInstance, config_of, request, turns

SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } }"
CPU, GPU = "instance_group { kind: KIND_CPU }", "instance_group { kind: KIND_GPU }"
MODEL = "instance_group { kind: KIND_MODEL }"


class Changing:
    """A model on held instances, of which a test wants others."""

    def __init__(self, groups: str, extra: str = "") -> None:
        self.extra = extra
        self.is_failing = False
        self.instances: list[HeldInstance] = []
        source = self._source(groups)
        first = self._begin(place_instances(source.config, 1))
        self.model = ScheduledModel(source, first, starter=InstanceStarter(1, self._start))
        self.client = Client(self.model)

    def _source(self, groups: str) -> ModelSource:
        return ModelSource(Path("/models/echo"), 1, config_of(f"{self.extra} {groups}"))

    def _begin(self, placements: Sequence[Placement]) -> list[HeldInstance]:
        begun = [HeldInstance(each.name, each) for each in placements]
        self.instances += begun
        return begun

    async def _start(self, source: ModelSource, placements: Sequence[Placement]) -> Sequence[Instance]:
        if self.is_failing:
            raise SluiceError(ErrorCode.INTERNAL, "no more")
        return self._begin(placements)

    async def change(self, groups: str) -> None:
        assert await self.model.update_instances(self._source(groups))

    @property
    def ids(self) -> list[list[list[str]]]:
        """The request ids of each batch, by instance in the order of their starts."""
        return [each.ids for each in self.instances]


async def test_those_that_stay_are_not_touched_and_idle_ones_have_ended() -> None:
    changing = Changing(CPU * 2)
    first, second = changing.instances
    await changing.change(CPU + MODEL)
    assert [each.is_closed for each in changing.instances] == [False, True, False]
    assert [group.kind for group in changing.model.config.instance_group] == [2, 3]
    for name in "abc":
        changing.client.submit(name)
    assert changing.ids == [[["a"]], [], [["b"]]]
    assert (first.is_closed, second.is_closed) == (False, True)
    await changing.model.close()


async def test_a_removed_instance_ends_its_request_first() -> None:
    changing = Changing(CPU)
    changing.client.submit("a")
    await changing.change(MODEL)
    old, new = changing.instances
    changing.client.submit("b")
    assert changing.ids == [[["a"]], [["b"]]]
    assert not old.is_closed
    old.finish()
    await turns()
    assert old.is_closed and changing.client.answered == ["a"]
    new.finish()
    await changing.model.close()


async def test_one_that_fails_to_start_leaves_the_model_as_it_was() -> None:
    changing = Changing(CPU)
    changing.is_failing = True
    with pytest.raises(SluiceError, match="no more"):
        await changing.change(CPU * 2)
    assert len(changing.model.config.instance_group) == 1
    changing.client.submit("a")
    assert changing.ids == [[["a"]]]
    await changing.model.close()


async def test_one_on_the_cpu_comes_last_from_when_there_are_gpus_on() -> None:
    changing = Changing(CPU)
    await changing.change(CPU + GPU)
    for name in "ab":
        changing.client.submit(name)
    assert changing.ids == [[["b"]], [["a"]]]
    await changing.model.close()


async def test_a_sequence_goes_on_where_it_is_until_it_ends() -> None:
    async def ask(name: str, of: int, flags: SequenceFlag = SequenceFlag.NONE) -> None:
        asked = request(name)
        asked.correlation_id, asked.sequence = of, flags
        changing.model.submit(asked, changing.client.receive)
        await turns()
        for each in changing.instances:
            if each.is_running:
                each.finish()
        await turns()

    changing = Changing(CPU * 2, SEQUENCES)
    await ask("a1", 1, SequenceFlag.START)
    await changing.change(MODEL)
    old, idle, _ = changing.instances
    assert (old.is_closed, idle.is_closed) == (False, True)
    await ask("a2", 1)
    await ask("b1", 2, SequenceFlag.START)
    assert not old.is_closed
    await ask("a3", 1, SequenceFlag.END)
    assert changing.ids == [[["a1"], ["a2"], ["a3"]], [], [["b1"]]]
    assert old.is_closed
    await changing.model.close()
