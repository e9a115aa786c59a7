"""From a model folder to answers: a real checkpoint, computed exactly, in an engine process of its own."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, Runtime, SchedulerPolicy
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.backend import LlmBackend, load_checkpoint
from sluice.pipelines.llm.fields import INPUTS, OUTPUTS
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.model_folder import CheckpointFolder, find_checkpoint, read_vllm_arguments
from sluice.pipelines.llm.services import LlmServices
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import SamplingOverrides, TextRequest
from sluice.serving.backend import BackendContext
from sluice.serving.config.completion import fill_defaults
from sluice.serving.config.validation import check_structure, check_tensors
from sluice.serving.model import infer_one
from sluice.serving.spec import ModelSource
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.pipelines.llm.calls import Record, ask, outputs, request, responses
from tests.pipelines.llm.conftest import SEED_CONFIGS
from tests.pulled import collected
from tests.serving.backends.builders import Lookup
from tests.serving.config.parts import parse_config, read_config
from tests.waiting import PATIENCE_S, until

PROMPT = "What is a sluice for?"


def engine_config(path: str, runtime: Runtime | None = None) -> EngineConfig:
    return EngineConfig(model_path=path, dtype="f32", num_blocks=64, max_model_len=512, num_threads=1)


SERVICES = LlmServices(engine_config, Record)
CONTEXT = BackendContext(Lookup())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    """A model's folder with nothing but a checkpoint in its version 1."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "1").symlink_to(checkpoint)
    return path


def source(folder: Path, text: str = "") -> ModelSource:
    config, _ = parse_config(text, "config.pbtxt")
    config.name = config.name or folder.name
    return ModelSource(folder, 1, config)


@asynccontextmanager
async def loaded(found: ModelSource) -> AsyncIterator[LlmModel]:
    """As the repository loads it."""
    backend = LlmBackend(SERVICES)
    complete = await backend.complete(found, CONTEXT)
    model = await backend.load(ModelSource(found.folder, found.version, complete), CONTEXT)
    try:
        yield model
    finally:
        await model.close()


async def direct(model: LlmModel, prompt: str, max_tokens: int) -> str:
    """Return the text that the OpenAI routes would get."""
    sampling = SamplingOverrides(max_tokens=max_tokens, temperature=0.0)
    sent = TextRequest(request_id="direct", prompt=prompt, sampling=sampling)
    return "".join([event.text for event in await collected(model.text.generate, sent)])


class TestConfiguration:
    async def test_a_checkpoint_alone_gets_both_faces(self, folder: Path) -> None:
        config = await LlmBackend(SERVICES).complete(source(folder, 'backend: "llm"'), CONTEXT)
        assert [each.name for each in config.input] == [each.name for each in INPUTS.values() if each.is_completed]
        assert [each.name for each in config.output] == [each.name for each in OUTPUTS.values() if each.is_completed]
        assert all(each.optional for each in config.input)
        assert config.model_transaction_policy.decoupled
        fill_defaults(config)
        check_structure(config)
        check_tensors(config)

    async def test_what_is_declared_stays(self, folder: Path) -> None:
        for name in ("000_llama3_8b.pbtxt",):
            config, _ = read_config(SEED_CONFIGS / name)
            before = config.SerializeToString(deterministic=True)
            completed = await LlmBackend(SERVICES).complete(ModelSource(folder, 1, config), CONTEXT)
            assert completed.SerializeToString(deterministic=True) == before

    async def test_a_policy_that_is_given_stays(self, folder: Path) -> None:
        config = await LlmBackend(SERVICES).complete(source(folder, "model_transaction_policy { }"), CONTEXT)
        assert config.input
        assert not config.model_transaction_policy.decoupled

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (
                'input { name: "frames" data_type: TYPE_FP32 dims: 1 } output { name: "text_output" '
                "data_type: TYPE_STRING dims: 1 }",
                "declares the input 'frames', which no LLM has",
            ),
            (
                'input { name: "text_input" data_type: TYPE_STRING dims: 1 } output { name: "mood" '
                "data_type: TYPE_STRING dims: 1 }",
                "declares the output 'mood', which no LLM has; there are .*text_output",
            ),
            ('input { name: "input_ids" data_type: TYPE_FP32 dims: -1 }', "must be of type INT32, got FP32"),
            ('input { name: "temperature" data_type: TYPE_FP32 dims: 1 }', "neither text_input nor input_ids"),
        ],
    )
    async def test_what_no_llm_could_follow_is_refused(self, folder: Path, text: str, words: str) -> None:
        with pytest.raises(SluiceError, match=words) as caught:
            async with loaded(source(folder, text)):
                pass
        assert caught.value.code is ErrorCode.INVALID


class TestCheckpoint:
    def test_the_versions_own_comes_first(self, folder: Path, checkpoint: Path) -> None:
        texts = {"gpt_model_path": str(checkpoint)}
        assert find_checkpoint(source(folder), texts) == CheckpointFolder(folder / "1", folder / "1")

    @pytest.mark.parametrize("key", ["gpt_model_path", "engine_dir", "model", "tokenizer_dir"])
    def test_parameters_point_to_it(self, tmp_path: Path, checkpoint: Path, key: str) -> None:
        (tmp_path / "1").mkdir()
        assert find_checkpoint(source(tmp_path), {key: str(checkpoint)}).path == checkpoint

    def test_a_relative_path_is_inside_the_models_folder(self, tmp_path: Path, checkpoint: Path) -> None:
        (tmp_path / "weights").symlink_to(checkpoint)
        assert find_checkpoint(source(tmp_path), {"model": "weights"}).path == tmp_path / "weights"

    def test_the_tokenizer_may_be_elsewhere(self, tmp_path: Path, checkpoint: Path) -> None:
        weights = tmp_path / "weights"
        shutil.copytree(checkpoint, weights, ignore=shutil.ignore_patterns("tokenizer*"))
        found = find_checkpoint(source(tmp_path), {"model": str(weights), "tokenizer_dir": str(checkpoint)})
        assert found == CheckpointFolder(weights, checkpoint)

    def test_an_openvino_ir_is_one(self, tmp_path: Path) -> None:
        (tmp_path / "1").mkdir()
        for name in ("config.json", "openvino_model.xml", "openvino_model.bin"):
            (tmp_path / "1" / name).touch()
        assert find_checkpoint(source(tmp_path), {}).path == tmp_path / "1"

    def test_a_compiled_engine_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "model.engine").touch()
        (tmp_path / "1" / "config.json").touch()
        with pytest.raises(SluiceError) as caught:
            find_checkpoint(source(tmp_path), {})
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert f"'{tmp_path}/1/model.engine' is a compiled TensorRT-LLM engine" in caught.value.message
        assert f"OpenVINO IR of the model into {tmp_path}/1, or name its folder" in caught.value.message

    def test_nothing_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(SluiceError, match=f"has no checkpoint in {tmp_path}/1 or /nowhere; put the HuggingFace"):
            find_checkpoint(source(tmp_path), {"model": "/nowhere"})

    def test_vllm_s_arguments_are_parameters(self, tmp_path: Path) -> None:
        arguments = {"model": "/m", "max_model_len": 99, "enforce_eager": True, "gpu_memory_utilization": 0.5}
        arguments |= {"quantization": None, "speculative_config": {"method": "ngram"}}
        (tmp_path / "model.json").write_text(json.dumps(arguments))
        assert read_vllm_arguments(tmp_path) == {
            "model": "/m",
            "max_model_len": "99",
            "enforce_eager": "true",
            "gpu_memory_utilization": "0.5",
            "speculative_config": '{"method":"ngram"}',
        }
        assert read_vllm_arguments(tmp_path / "none") == {}
        (tmp_path / "model.json").write_text("[]")
        with pytest.raises(SluiceError, match=r"cannot read .*model\.json"):
            read_vllm_arguments(tmp_path)


def test_two_may_load_their_text_side_at_once(rill_path: Path) -> None:
    """In a process of its own, where transformers is not imported yet."""
    program = f"""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.engine.in_process_client import InProcessEngineClient
from sluice.engine.config import EngineConfig, Runtime
from sluice.pipelines.llm.services import LlmServices
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
def load(name):
    return load_text(LlmText, name, Path({str(rill_path)!r}), InProcessEngineClient(EngineConfig(model_path="")))
with ThreadPoolExecutor(4) as pool:
    print(len(list(pool.map(load, "abcd"))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "4\n", done.stderr


class TestServing:
    @pytest.mark.slow
    async def test_a_checkpoint_alone_whose_engine_is_replaced_when_it_dies(self, folder: Path) -> None:
        async with loaded(source(folder, "max_batch_size: 4")) as model:
            assert model.is_ready
            expected = await direct(model, PROMPT, 12)
            fields = {"text_input": PROMPT, "max_tokens": 12}
            assert (await ask(model, fields))["text_output"] == expected
            parts = [outputs(part) async for part in responses(model, fields | {"stream": True})]
            assert "".join(part["text_output"] for part in parts) == expected
            await self._token_face_agrees(model, expected)
            await self._batch_is_its_rows(model)
            assert isinstance(model.engine, ProcessEngineClient) and model.engine.pid is not None
            os.kill(model.engine.pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda: not model.is_ready)
                await until(lambda: model.is_ready)
            assert (await ask(model, {"text_input": PROMPT}))["finish_reason"] == "length"

    @staticmethod
    async def _token_face_agrees(model: LlmModel, expected: str) -> None:
        token_ids = await model.text.prepare(PROMPT)
        fields = {"input_ids": token_ids, "request_output_len": 12, "exclude_input_in_output": True}
        answer = await ask(model, fields)
        detokenizer = model.text.tokenizer.detokenizer()
        assert detokenizer.feed(answer["output_ids"]) + detokenizer.flush() == expected

    @staticmethod
    async def _batch_is_its_rows(model: LlmModel) -> None:
        prompts = [PROMPT, "Rivers", "one two three four five six seven"]
        fields = {
            "text_input": np.array([[prompt.encode()] for prompt in prompts], np.object_),
            "max_tokens": np.array([[12], [5], [20]], np.int32),
        }
        answer = await infer_one(model, request(model, fields))
        rows = [row[0].decode() for row in answer.outputs[0].array.tolist()]
        assert rows == [await direct(model, p, n) for p, n in zip(prompts, (12, 5, 20), strict=True)]

    @pytest.mark.slow
    async def test_seed_000_and_the_client_printed_in_it(self, tmp_path: Path, checkpoint: Path) -> None:
        (tmp_path / "1").symlink_to(checkpoint)
        config, _ = read_config(SEED_CONFIGS / "000_llama3_8b.pbtxt")
        async with loaded(ModelSource(tmp_path, 1, config)) as model:
            info = model.engine.info
            assert info.num_blocks * info.block_size == 20_000
            assert info.scheduler_policy == SchedulerPolicy.GUARANTEED_NO_EVICT
            input_ids = np.array([await model.text.prepare(PROMPT)], np.int32)
            fields = {
                "input_ids": input_ids,
                "input_lengths": np.array([[input_ids.shape[1]]], dtype=np.int32),
                "request_output_len": np.array([[12]], dtype=np.int32),
            }
            response = await infer_one(model, request(model, fields, requested_outputs=("output_ids",)))
            (output_ids,) = response.outputs
            assert (output_ids.name, output_ids.datatype) == ("output_ids", "INT32")
            detokenizer = model.text.tokenizer.detokenizer()
            text = detokenizer.feed(output_ids.array[0].tolist()) + detokenizer.flush()
            assert text == PROMPT + await direct(model, PROMPT, 12)

    @pytest.mark.slow
    async def test_parameters_set_the_engine(self, tmp_path: Path, checkpoint: Path) -> None:
        version = tmp_path / "1"
        version.mkdir()
        arguments = {"model": str(checkpoint), "max_model_len": 128, "max_num_seqs": 3}
        (version / "model.json").write_text(json.dumps(arguments))
        text = """
          parameters { key: "batch_scheduler_policy" value { string_value: "max_utilization" } }
          parameters { key: "tool_call_parser" value { string_value: "hermes" } }
          dynamic_batching { default_queue_policy { max_queue_size: 5 } }
        """
        async with loaded(source(tmp_path, text)) as model:
            info = model.engine.info
            assert (info.max_model_len, info.max_num_seqs) == (128, 3)
            assert info.scheduler_policy == SchedulerPolicy.MAX_UTILIZATION
            assert model.engine.config.max_queued_requests == 5
            assert model.text.formats.tools is not None and model.text.formats.tools.name == "hermes"

    @pytest.mark.usefixtures("without_garbage_collection")
    async def test_an_unloaded_model_s_tokenizer_does_not_wait_for_the_garbage_collector(self, folder: Path) -> None:
        async def unloaded() -> "weakref.ref[Tokenizer]":
            async with loaded(source(folder)) as model:
                await ask(model, {"text_input": PROMPT, "max_tokens": 4})
                assert model.statistics.count_pending() == 0
                await model.unload()
                return weakref.ref(model.text.tokenizer)

        assert (await unloaded())() is None

    async def test_a_checkpoint_that_cannot_be_loaded_leaves_no_process(self, tmp_path: Path, checkpoint: Path) -> None:
        shutil.copytree(checkpoint, tmp_path / "1", ignore=shutil.ignore_patterns("tokenizer*"))
        children = _children()
        with pytest.raises(SluiceError, match="has no tokenizer"):
            async with loaded(source(tmp_path)):
                pass
        assert _children() == children

    async def test_a_bare_checkpoint_over_an_engine_that_is_starting(self, checkpoint: Path) -> None:
        engine = ProcessEngineClient(engine_config(str(checkpoint)))
        starting = asyncio.create_task(engine.start())
        model = await load_checkpoint("tiny", checkpoint, engine, starting, Record)
        try:
            parameters: dict[str, Any] = {key: each.string_value for key, each in model.config.parameters.items()}
            assert parameters["max_tokens_in_paged_kv_cache"] == str(64 * 32)
            assert parameters["batching_strategy"] == "inflight_fused_batching"
            assert (await ask(model, {"text_input": PROMPT, "max_tokens": 3}))["finish_reason"] == "length"
        finally:
            await model.close()
            await model.close()


def _children() -> set[str]:
    return set((Path("/proc/self/task") / str(os.getpid()) / "children").read_text().split())
