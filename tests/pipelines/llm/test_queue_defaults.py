"""The effect of dynamic_batching on an engine that batches in flight."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.configuration import QueueDefaults, default_llm_config, read_queue_defaults
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.setup import ignored_queue_fields
from sluice.serving.model import infer_one
from tests.engine.in_process_client import InProcessEngineClient
from tests.pipelines.llm.calls import ask, request
from tests.pipelines.llm.conftest import SEED_CONFIGS
from tests.pipelines.llm.stepped_runner import SteppedRunner
from tests.serving.config.parts import parse_config, read_config
from tests.waiting import until


def config(name: str) -> ModelConfig:
    return read_config(Path(SEED_CONFIGS / name))[0]


def test_the_rules_of_seed_000() -> None:
    rules = read_queue_defaults(config("000_dynamic_batching.pbtxt"))
    assert rules == QueueDefaults(num_levels=3, default_level=2, timeout_us=30_000_000)
    assert [rules.priority(requested) for requested in (0, 1, 2, 3, 4)] == [2, 1, 2, 3, 2]


def test_without_levels_any_priority_is_one() -> None:
    assert read_queue_defaults(ModelConfig()) == QueueDefaults()
    assert [QueueDefaults().priority(requested) for requested in (0, 7)] == [0, 7]


def test_notes_on_fields_without_effect() -> None:
    assert ignored_queue_fields(ModelConfig()) == []
    assert ignored_queue_fields(config("000_dynamic_batching.pbtxt")) == [
        "dynamic_batching: a request joins the running batch at its next step"
    ]
    text = """
      dynamic_batching {
        preserve_ordering: true
        priority_levels: 2
        default_priority_level: 1
        default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 }
        priority_queue_policy { key: 1 value { max_queue_size: 4 } }
      }
    """
    notes = ignored_queue_fields(parse_config(text, "config.pbtxt")[0])
    assert [note.partition(":")[0] for note in notes] == [
        "dynamic_batching.preserve_ordering",
        "dynamic_batching.priority_queue_policy",
        "dynamic_batching.default_queue_policy.timeout_action",
    ]


async def test_the_default_level_and_timeout_reach_the_engine(
    make: Callable[[ModelConfig], LlmModel], engine: InProcessEngineClient, runner: SteppedRunner
) -> None:
    rules = default_llm_config("echo")
    rules.dynamic_batching.priority_levels = 3
    rules.dynamic_batching.default_priority_level = 2
    rules.dynamic_batching.default_queue_policy.default_timeout_microseconds = 50_000
    model = make(rules)
    runner.hold()
    running = asyncio.create_task(ask(model, {"text_input": "hello", "max_tokens": 2}))
    await until(lambda: bool(engine._streams))
    (stream,) = engine._streams.values()
    assert (stream.request.priority, stream.request.queue_timeout_s) == (2, 0.05)
    runner.release()
    assert (await running)["finish_reason"] == "length"


async def test_what_waits_longer_than_the_default_is_refused(
    make: Callable[[ModelConfig], LlmModel], runner: SteppedRunner
) -> None:
    rules = default_llm_config("echo")
    rules.dynamic_batching.default_queue_policy.default_timeout_microseconds = 50_000
    model = make(rules)
    runner.hold()
    with pytest.raises(SluiceError) as caught:
        # The runner stands still, so the engine never says that it began.
        await infer_one(model, request(model, {"text_input": "hello"}))
    assert caught.value.code is ErrorCode.DEADLINE
