"""Configurations that users published, each completed with models of its names and loaded as it is."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from sluice.engine.config import EngineConfig, Runtime
from sluice.pipelines.llm.backend import LlmBackend
from sluice.pipelines.llm.services import LlmServices
from sluice.serving.backend import BackendContext, ModelLookup
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.completion import has_gpu
from sluice.serving.config.pbtxt import parse_pbtxt
from sluice.serving.config.validation import check_structure
from sluice.serving.findings import Finding
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.folders import LocalRoot
from sluice.serving.repository.inspection import Verdict, inspect_repositories
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor
from tests import paths
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.serving.repository.small_models import write_onnx, write_python

pytestmark = pytest.mark.slow

SEEDS = paths.DATA / "seed_configs"
NO_GPU = "there is no GPU, instances of KIND_GPU run on the CPU"
BASE = """
name: "piece" backend: "onnxruntime" max_batch_size: 64
input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
"""The rest of a model for a piece of a configuration, which is put before it so that its lines keep their numbers."""


@dataclass(frozen=True)
class Seed:
    """`write` makes the models of a repository of the seed's text; `model` is the one that the seed configures."""

    model: str = "piece"
    write: Callable[[Path, str], None] | None = None
    notes: tuple[str, ...] = ()
    versions: tuple[int, ...] = (1,)
    check: Callable[[Model], Awaitable[None]] | None = None
    """Looks at what the model computes."""


def batching(root: Path, name: str, max_batch_size: int) -> Path:
    """An ONNX model's folder that says no more than how large its batches are."""
    return with_config(root / name, f'backend: "onnxruntime" max_batch_size: {max_batch_size}')


def with_config(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.pbtxt").write_text(text)
    return folder


def piece(root: Path, text: str) -> None:
    folder = with_config(root / "piece", text + BASE)
    for version in (1, 2, 3):
        write_onnx(folder / str(version) / "model.onnx", ["input_ids"], "logits", 2)


def text_classifier(root: Path, text: str) -> None:
    folder = with_config(root / "text_classifier", text)
    for version in (1, 2, 3):
        write_onnx(folder / str(version) / "model.onnx", ["input_ids", "attention_mask"], "logits", 2)


def bert_classifier(root: Path, text: str) -> None:
    folder = with_config(root / "bert-classifier", text)
    inputs = ["input_ids", "attention_mask", "token_type_ids"]
    write_onnx(folder / "1" / "model.onnx", inputs, "logits", 2, keeps_length=True)


def llama(root: Path, text: str) -> None:
    write_tiny_checkpoint(with_config(root / "llama3_8b", text) / "1")


def ensemble_pipeline(root: Path, text: str) -> None:
    with_config(root / "ensemble_pipeline", text)
    (root / "ensemble_pipeline" / "1").mkdir()
    lengths = "np.array([[[len(each)] * 10] for each in given[:, 0]], np.int64)[:, 0]"
    write_python(root / "tokenizer", ("text", "STRING [1]"), ("tokens", "INT64 [-1]"), lengths, 64)
    write_onnx(batching(root, "bert_model", 64) / "1" / "model.onnx", ["input_ids"], "logits", 10)
    write_python(root / "postprocessor", ("raw_logits", "FP32 [10]"), ("final", "FP32 [10]"), "given * 2", 64)


async def check_pipeline(model: Model) -> None:
    given = Tensor.of("raw_text", np.array([[b"four"], [b"sixsix"]], object))
    response = await infer_one(model, InferRequest({"raw_text": given}))
    assert response.outputs[0].array.tolist() == [[8.0] * 10, [12.0] * 10]


def classification_pipeline(root: Path, text: str) -> None:
    with_config(root / "nlp-classification-pipeline", text)
    (root / "nlp-classification-pipeline" / "1").mkdir()
    lengths = "np.array([[len(each) for each in row] for row in given], np.int64)"
    write_python(root / "tokenizer", ("text", "STRING [-1]"), ("input_ids", "INT64 [-1]"), lengths, 32)
    write_onnx(batching(root, "bert-encoder", 32) / "1" / "model.onnx", ["input_ids"], "embeddings", 4)
    write_python(root / "classifier-head", ("embeddings", "FP32 [4]"), ("logits", "FP32 [2]"), "given[:, :2]", 32)
    texts = "np.array([[str(each) for each in row] for row in given], object)"
    write_python(root / "postprocessor", ("logits", "FP32 [2]"), ("result", "STRING [-1]"), texts, 32)


LOADED = {
    "000_dynamic_batching": Seed(versions=(3,)),
    "000_instance_group_cpu": Seed(versions=(3,)),
    "000_instance_group_two_gpus": Seed(versions=(3,), notes=(NO_GPU,)),
    "000_llama3_8b": Seed(
        "llama3_8b",
        llama,
        (
            "config.pbtxt:8: TYPE_BYTES is read as TYPE_STRING, its name in config.pbtxt; write: "
            "data_type: TYPE_STRING",
            'config.pbtxt:29: parameter "scheduler_policy" is read as "batch_scheduler_policy", its name with '
            'TensorRT-LLM; write: parameters { key: "batch_scheduler_policy" value { string_value: '
            '"guaranteed_no_evict" } }',
        ),
    ),
    "002_ensemble_pipeline": Seed("ensemble_pipeline", ensemble_pipeline, check=check_pipeline),
    "002_model_warmup": Seed(versions=(3,)),
    "002_text_classifier": Seed("text_classifier", text_classifier, (NO_GPU,), (2, 3)),
    "004_bert_classifier": Seed(
        "bert-classifier",
        bert_classifier,
        (
            "config.pbtxt:45: this gpu_execution_accelerator has no name, and is left out; write: "
            'gpu_execution_accelerator [ { name: "tensorrt" } ]',
            NO_GPU,
        ),
    ),
    "004_instance_group_cpu_fallback": Seed(versions=(3,), notes=(NO_GPU,)),
    "004_instance_group_large": Seed(versions=(3,), notes=(NO_GPU,)),
    "004_instance_group_primary": Seed(versions=(3,), notes=(NO_GPU,)),
    "004_instance_group_small_gpu_cpu": Seed(versions=(3,), notes=(NO_GPU,)),
    "004_nlp_classification_pipeline": Seed("nlp-classification-pipeline", classification_pipeline),
    "004_tuning_cpu_instances": Seed(versions=(3,)),
    "004_tuning_dynamic_batching": Seed(versions=(3,)),
    "004_tuning_gpu_instances": Seed(versions=(3,), notes=(NO_GPU,)),
    "004_tuning_warmup": Seed(versions=(3,)),
    "004_version_policy_agents_invalid": Seed(
        versions=(2, 3),
        notes=(
            "config.pbtxt:1: there is no agent of kind version_policy, it is left out: version_policy in line 10 says "
            "which versions are served; write: version_policy alone; an agent is model_repository_agents { agents [ { "
            'name: "checksum" } ] }',
        ),
    ),
}
REFUSED = {"000_rag_pipeline", "004_rate_limit_invalid", "004_tensorrt_cc_model_filenames"}


def test_no_seed_is_forgotten() -> None:
    assert LOADED.keys() | REFUSED == {path.stem for path in SEEDS.glob("*.pbtxt")}


def text_of(stem: str) -> str:
    return (SEEDS / f"{stem}.pbtxt").read_text("utf-8")


class Served:
    """A repository as a server has it."""

    def __init__(self, root: Path) -> None:
        self.notes: list[str] = []
        registry = BackendRegistry()
        registry.register(LlmBackend(LlmServices(self._engine_config)), "llm", "tensorrtllm", "vllm")
        self.repository = ModelRepository(
            [root], ControlMode.NONE, self._context, on_note=self.notes.append, registry=registry
        )

    def _context(self, models: ModelLookup) -> BackendContext:
        return BackendContext(models)

    def _engine_config(self, path: str, runtime: Runtime | None) -> EngineConfig:
        return EngineConfig(model_path=path, dtype="f32", num_blocks=64, max_model_len=512, num_threads=1)

    async def start(self) -> dict[str, str]:
        """Return the errors by model."""
        return {name: error.message for name, error in (await self.repository.start()).items()}

    async def aclose(self) -> None:
        await self.repository.close()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("stem", LOADED)
async def test_it_loads_as_it_is_and_a_check_says_the_same(stem: str, tmp_path: Path) -> None:
    seed = LOADED[stem]
    (seed.write or piece)(tmp_path, text_of(stem))
    reports = {report.name: report for report in inspect_repositories([LocalRoot(tmp_path)], BackendRegistry())}
    report = reports.pop(seed.model)
    assert (report.verdict, report.errors) == (Verdict.NOTES if seed.notes else Verdict.OK, ())
    assert report.versions == seed.versions
    assert {told_at_load(note) for note in report.notes} == set(seed.notes)
    assert {other.verdict for other in reports.values()} <= {Verdict.OK}
    async with aclosing(Served(tmp_path)) as served:
        assert await served.start() == {}
        rows = {row.version: row.state for row in served.repository.index() if row.name == seed.model}
        assert rows == dict.fromkeys(seed.versions, ModelState.READY)
        assert served.repository.is_ready
        if seed.check is not None:
            await seed.check(served.repository.find(seed.model))
        said = [note for note in served.notes if f"'{seed.model}'" in note]
        assert said == ([f"model '{seed.model}': {'; '.join(seed.notes)}"] if seed.notes else [])


def told_at_load(note: Finding) -> str:
    """A note of the check in the words of the log."""
    return note.message if note.message == NO_GPU else replace(note, column=None).text("config.pbtxt")


RAG_REFUSAL = (
    "failed to load 'rag_pipeline', failed to poll from model repository: "
    "ensemble output 'response' for ensemble rag_pipeline' is not used ({file}:8); write: output_map {{ key: "
    '"output_ids" value: "response" }} in step 2 (llama3_8b), which makes \'response_ids\' for nobody; '
    "config.pbtxt:28: output 'response_ids' for ensemble 'rag_pipeline' is not written: at least one of its depending "
    'tensors, \'augmented_input_ids\', is not connected; write: value: "query" or "query_embeddings" or '
    '"retrieved_context", or a step with output_map {{ key: "…" value: "augmented_input_ids" }}; '
    "config.pbtxt:22: ensemble tensor 'retrieved_context' is unused in ensemble 'rag_pipeline'; write: an input_map or "
    'an output that takes "retrieved_context", or leave this output_map out'
)


async def test_the_ensemble_whose_tensors_dangle(tmp_path: Path) -> None:
    """Serving it would be a lie: nobody makes what it promises."""
    folder = with_config(tmp_path / "rag_pipeline", text_of("000_rag_pipeline"))
    (folder / "1").mkdir()
    async with aclosing(Served(tmp_path)) as served:
        failures = await served.start()
        assert failures == {"rag_pipeline": RAG_REFUSAL.format(file=folder / "config.pbtxt")}
        assert served.notes == list(failures.values())
        assert not served.repository.is_ready


def test_the_ensemble_with_what_was_told_to_write() -> None:
    text = text_of("000_rag_pipeline").replace('value: "response_ids"', 'value: "response"')
    step = """{
      model_name: "augment" model_version: -1
      input_map { key: "context" value: "retrieved_context" } input_map { key: "query" value: "query" }
      output_map { key: "input_ids" value: "augmented_input_ids" }
    },"""
    check_structure(parse_pbtxt(text.replace("step [", f"step [ {step}"), "config.pbtxt").config)


RATE_LIMIT_REFUSAL = (
    "failed to load 'piece', failed to poll from model repository: failed to read text proto from {file}:1:1: "
    "ModelConfig has no field 'rate_limit_resources': how much there is of a resource is said to the server, what an "
    "instance takes of it in its instance_group; write: instance_group [ {{ rate_limiter {{ resources [ {{ name: "
    '"gpu_memory" global: true count: 1 }} ] }} }} ], and start with --rate-limit-resource=gpu_memory:COUNT; '
    "config.pbtxt:11:1: ModelInstanceGroup has no field 'rate_limit_resources'; write: rate_limiter {{ resources [ {{ "
    'name: "gpu_memory" global: true count: 1 }} ] }}'
)


async def test_resources_where_triton_has_none(tmp_path: Path) -> None:
    """How many are taken and how many there are, the text does not say."""
    piece(tmp_path, text_of("004_rate_limit_invalid"))
    async with aclosing(Served(tmp_path)) as served:
        file = tmp_path / "piece" / "config.pbtxt"
        assert await served.start() == {"piece": RATE_LIMIT_REFUSAL.format(file=file)}


@pytest.mark.usefixtures("no_gpu")
async def test_resources_as_it_was_told_to_write(tmp_path: Path) -> None:
    text = """
    default_model_filename: "model.onnx"
    instance_group [ { kind: KIND_GPU count: 2
      rate_limiter { resources [ { name: "gpu_memory" global: true count: 1 } ] } } ]
    """
    piece(tmp_path, text)
    async with aclosing(Served(tmp_path)) as served:
        assert await served.start() == {}


@pytest.mark.skipif(has_gpu(), reason="says what becomes of plans without a GPU")
async def test_plans_without_a_gpu(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "piece", text_of("004_tensorrt_cc_model_filenames"))
    (folder / "1").mkdir()
    for capability in (75, 80, 86):
        (folder / "1" / f"model.sm{capability}.plan").write_bytes(b"plan")
    (report,) = inspect_repositories([LocalRoot(tmp_path)], BackendRegistry())
    assert [each.text() for each in report.notes if "is read as" in each.message] == [
        '3: "75" is read as the compute capability 7.5; write: key: "7.5"',
        '7: "80" is read as the compute capability 8.0; write: key: "8.0"',
        '11: "86" is read as the compute capability 8.6; write: key: "8.6"',
    ]
    async with aclosing(Served(tmp_path)) as served:
        failures = await served.start()
    assert "GPU" in failures["piece"]
