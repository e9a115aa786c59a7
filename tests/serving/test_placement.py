from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.instance import Placement, Resource, place_instances


def places(text: str, num_gpus: int = 0) -> list[Placement]:
    return place_instances(text_format.Parse(f'name: "m" {text}', ModelConfig()), num_gpus)


def names(text: str, num_gpus: int = 0) -> list[tuple[str, int | None]]:
    return [(each.name, each.gpu) for each in places(text, num_gpus)]


def test_instances_are_numbered_within_their_group() -> None:
    text = 'instance_group { name: "g" count: 2 kind: KIND_CPU } instance_group { name: "h" count: 1 kind: KIND_CPU }'
    assert places(text) == [Placement("g_0"), Placement("g_1"), Placement("h_0")]


def test_without_groups_there_is_one_on_the_cpu() -> None:
    assert places("", num_gpus=4) == [Placement("m_0")]


def test_a_group_of_gpus_has_its_count_on_each() -> None:
    text = 'instance_group { name: "g" count: 2 kind: KIND_GPU gpus: [0, 2] }'
    assert names(text, num_gpus=4) == [("g_0", 0), ("g_1", 0), ("g_2", 2), ("g_3", 2)]


def test_a_group_that_names_no_gpus_is_on_all() -> None:
    assert names('instance_group { name: "g" count: 1 kind: KIND_GPU }', num_gpus=2) == [("g_0", 0), ("g_1", 1)]
    assert names('instance_group { name: "g" count: 1 }', num_gpus=2) == [("g_0", 0), ("g_1", 1)]


def test_without_gpus_their_instances_are_on_the_cpu() -> None:
    text = 'instance_group { name: "g" count: 1 kind: KIND_GPU gpus: [0, 1] }'
    assert places(text) == [Placement("g_0", kind="GPU"), Placement("g_1", kind="GPU")]


def test_cpu_instances_beside_gpus_are_spill_over() -> None:
    text = 'instance_group { name: "g" count: 1 kind: KIND_GPU } instance_group { name: "c" count: 1 kind: KIND_CPU }'
    assert [each.is_spillover for each in places(text)] == [False, True]


def test_what_the_group_asks_of_the_limiter_and_the_host() -> None:
    text = """instance_group { name: "g" count: 1 kind: KIND_CPU passive: true host_policy: "p"
        rate_limiter { resources { name: "r" count: 4 global: true } priority: 3 } }"""
    place = Placement("g_0", is_passive=True, host_policy="p", resources=(Resource("r", 4, True),), priority=3)
    assert places(text) == [place]
