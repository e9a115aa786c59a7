from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.repository.config_text import parse_config
from pipelines.repository.obeyed import NOT_OBEYED, OBEYED, unobeyed_note


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that hold a value; a map is one."""
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry or not inner.fields:
            yield prefix + field.name
        else:
            yield from leaves(inner, f"{prefix}{field.name}.")


def paths(leaf: str) -> set[str]:
    parts = leaf.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


EVERY_LEAF = list(leaves(ModelConfig.DESCRIPTOR))


@pytest.mark.parametrize("leaf", EVERY_LEAF)
def test_every_field_is_obeyed_or_named(leaf: str) -> None:
    always = {path for path, rule in NOT_OBEYED.items() if not rule.only_by}
    assert len(paths(leaf) & (OBEYED | always)) == 1 or (
        leaf == "response_cache.enable" and "response_cache" in NOT_OBEYED
    )


def test_no_rule_is_for_nothing() -> None:
    known = {path for leaf in EVERY_LEAF for path in paths(leaf)}
    assert OBEYED | NOT_OBEYED.keys() <= known


@pytest.mark.parametrize(
    ("backend", "text", "expected"),
    [
        ("python", "dynamic_batching { priority_levels: 2 } response_cache { enable: true }", []),
        ("python", "model_metrics { }", ["model_metrics"]),
        ("python", "optimization { graph { level: 1 } cuda { graphs: true } }",
         ["optimization.graph", "optimization.cuda"]),
        ("onnxruntime", "optimization { graph { level: 1 } }", []),
        ("python", "instance_group { rate_limiter { priority: 1 } } instance_group { passive: true }",
         ["instance_group.rate_limiter", "instance_group.passive"]),
        ("python", "sequence_batching { oldest { max_candidate_sequences: 4 } }", []),
        ("python", "sequence_batching { state { input_name: 'i' } }", ["sequence_batching.state"]),
        ("tensorrtllm", "sequence_batching { max_sequence_idle_microseconds: 4 }", ["sequence_batching"]),
        ("tensorrtllm", "response_cache { enable: true }", ["response_cache"]),
        ("python", "model_warmup { name: 'w' } model_warmup { name: 'v' }", ["model_warmup"]),
    ],
)  # fmt: skip
def test_what_is_given_and_not_obeyed_is_named_once(backend: str, text: str, expected: list[str]) -> None:
    config, _ = parse_config(f"backend: '{backend}' {text}", "config.pbtxt")
    notes = unobeyed_note(config)
    reasons = "; ".join(f"{path} ({NOT_OBEYED[path].reason})" for path in expected)
    assert notes == ([f"not obeyed: {reasons}"] if expected else [])
