import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper, save
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.batching.warm_up import read_samples, warm_up
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.spec import ModelSource
from tests import paths
from tests.serving.backends.onnxruntime.parts import graph, value
from tests.serving.repository.parts import READY, StampBackend, StampModel, context_for, failure, rows, write_model
from tests.waiting import until

SEEDS = paths.DATA / "seed_configs"
WIDTH = 4
CLASSIFIER = """
platform: "onnxruntime_onnx" max_batch_size: 64
input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "logits" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def warmup(value: str, batch_size: int = 1, count: int = 0, name: str = "X") -> str:
    """A sample of one input."""
    entry = f'inputs {{ key: "{name}" value {{ {value} }} }}'
    return f'model_warmup {{ name: "w" batch_size: {batch_size} count: {count} {entry} }}'


def config_of(text: str, max_batch_size: int = 8) -> ModelConfig:
    return text_format.Parse(f'name: "m" max_batch_size: {max_batch_size} {text}', ModelConfig())


class TestSamples:
    @pytest.mark.parametrize(
        ("rows", "count", "max_batch_size", "expected"),
        [
            pytest.param(4, 5, 8, [(5, (4, 2, 3))], id="as many rows as the batch has"),
            pytest.param(1, 0, 8, [(1, (1, 2, 3))], id="once without a count"),
            pytest.param(0, 1, 8, [], id="never without rows"),
            pytest.param(1, 1, 0, [(1, (2, 3))], id="the dims as they are without a batch dimension"),
        ],
    )
    def test_zeros(
        self, rows: int, count: int, max_batch_size: int, expected: list[tuple[int, tuple[int, ...]]]
    ) -> None:
        config = config_of(warmup("data_type: TYPE_FP16 dims: [2, 3] zero_data: true", rows, count), max_batch_size)
        samples = read_samples(config, Path())
        assert [(each.count, each.inputs["X"].shape) for each in samples] == expected
        for each in samples:
            assert (each.name, each.inputs["X"].name, each.inputs["X"].datatype) == ("w", "X", "FP16")
            assert not each.inputs["X"].array.any()

    def test_more_rows_than_a_model_takes_are_refused(self) -> None:
        many = warmup("data_type: TYPE_INT8 dims: [2] zero_data: true", 3)
        with pytest.raises(SluiceError, match="batch size 3 for 'm', max allowed is 0"):
            read_samples(config_of(many, 0), Path())

    @pytest.mark.parametrize("data_type", ["TYPE_INT64", "TYPE_UINT8", "TYPE_BOOL", "TYPE_FP32", "TYPE_BF16"])
    def test_random_values_are_such_as_any_model_takes(self, data_type: str) -> None:
        config = config_of(warmup(f"data_type: {data_type} dims: [200] random_data: true", 2))
        array = read_samples(config, Path())[0].inputs["X"].array.astype(np.float64)
        assert array.min() >= 0 and array.max() <= 1
        assert len(np.unique(array)) > 1
        assert (array[0] == array[1]).all()
        assert (array == read_samples(config, Path())[0].inputs["X"].array.astype(np.float64)).all()

    def test_strings(self) -> None:
        empty = read_samples(config_of(warmup("data_type: TYPE_STRING dims: [2] zero_data: true", 2)), Path())[0]
        assert empty.inputs["X"].array.tolist() == [[b"", b""]] * 2
        some = read_samples(config_of(warmup("data_type: TYPE_STRING dims: [9] random_data: true")), Path())[0]
        words = some.inputs["X"].array.ravel().tolist()
        assert all(1 <= len(word) <= 16 and word.isalpha() for word in words)
        assert len(set(words)) > 1

    def test_files(self, tmp_path: Path) -> None:
        (tmp_path / "warmup").mkdir()
        (tmp_path / "warmup" / "numbers").write_bytes(np.arange(5, dtype=np.int32).tobytes())
        (tmp_path / "warmup" / "words").write_bytes(b"\3\0\0\0abc\0\0\0\0")
        numbers = warmup('data_type: TYPE_INT32 dims: [4] input_data_file: "numbers"', 2)
        assert read_samples(config_of(numbers), tmp_path)[0].inputs["X"].array.tolist() == [[0, 1, 2, 3]] * 2
        words = warmup('data_type: TYPE_STRING dims: [2] input_data_file: "words"')
        assert read_samples(config_of(words), tmp_path)[0].inputs["X"].array.tolist() == [[b"abc", b""]]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ('data_type: TYPE_INT32 dims: [6] input_data_file: "short"', "expects 24 bytes, .* only has 10 bytes"),
            ('data_type: TYPE_STRING dims: [3] input_data_file: "short"', "expects 12 bytes, .* only has 10 bytes"),
            ('data_type: TYPE_STRING dims: [1] input_data_file: "short"', "does not fit the dims"),
            ('data_type: TYPE_INT32 dims: [1] input_data_file: "none"', "failed to open text file for read .*none"),
            ('data_type: TYPE_INT32 dims: [1] input_data_file: "../x"', "not a path inside a model's folder"),
        ],
    )
    def test_what_cannot_be(self, value: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "warmup").mkdir()
        (tmp_path / "warmup" / "short").write_bytes(b"\3\0\0\0abc\0\0\0")
        with pytest.raises(SluiceError, match=message):
            read_samples(config_of(warmup(value)), tmp_path)


class TestLoads:
    @pytest.mark.parametrize("seed", ["002_model_warmup", "004_tuning_warmup"])
    async def test_the_users_warm_ups_run_before_the_model_is_ready(
        self, seed: str, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_classifier(root, CLASSIFIER + (SEEDS / f"{seed}.pbtxt").read_text())
        caplog.set_level(logging.INFO)
        repository = ModelRepository([root], ControlMode.NONE, context_for)
        await repository.start()
        assert rows(repository) == {("m", 1): READY}
        assert "m version 1: warmed up in" in caplog.text
        assert repository.find("m").statistics.execution_count == 0
        await repository.close()

    async def test_a_warm_up_that_fails_fails_the_load(self, root: Path) -> None:
        too_wide = warmup("data_type: TYPE_INT64 dims: [2] input_data_file: 'ids'", name="input_ids")
        folder = write_classifier(root, CLASSIFIER + too_wide)
        (folder / "warmup").mkdir()
        (folder / "warmup" / "ids").write_bytes(np.array([1, 99], np.int64).tobytes())
        repository = ModelRepository([root], ControlMode.EXPLICIT, context_for)
        await repository.start()
        error = await failure(repository.load("m"))
        assert "failed to run warmup sample 'w': onnx runtime error" in error.message
        assert "out of data bounds" in rows(repository)["m", 1][1]
        await repository.close()

    async def test_every_sample_runs_as_often_as_it_says(self, root: Path) -> None:
        model, source = await stamp(root, warmup("data_type: TYPE_INT32 dims: [1] zero_data: true", 1, 3, "IN") * 2)
        asked = 0

        async def counted(request: object) -> None:
            nonlocal asked
            asked += 1

        model.warm_up = counted  # type: ignore[method-assign]
        await warm_up(model, source)
        assert asked == 6
        await model.close()

    async def test_a_model_without_instances_is_asked_like_by_a_client_and_counts_nothing(self, root: Path) -> None:
        model, source = await stamp(root, warmup("data_type: TYPE_INT32 dims: [1] zero_data: true", 1, 3, "IN"))
        await warm_up(model, source)
        assert model.statistics.infer.success.count == 0
        assert model.num_in_flight == 0
        await model.close()

    async def test_one_that_takes_too_long_is_given_up(self, root: Path) -> None:
        model, source = await stamp(root, warmup("data_type: TYPE_INT32 dims: [1] zero_data: true", 1, 1, "IN"))
        model.gate.clear()
        with pytest.raises(SluiceError, match=r"its warm-up took longer than 0.01 s") as late:
            await warm_up(model, source, limit_s=0.01)
        assert late.value.code is ErrorCode.DEADLINE
        await model.close()

    async def test_a_cancelled_load_ends_its_warm_up_and_closes_the_model(self, root: Path) -> None:
        model, source = await stamp(root, warmup("data_type: TYPE_INT32 dims: [1] zero_data: true", 1, 1, "IN"))
        model.gate.clear()
        warming = asyncio.create_task(warm_up(model, source))
        await until(lambda: model.num_in_flight)
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        await model.close()


async def stamp(root: Path, text: str) -> tuple[StampModel, ModelSource]:
    """A loaded model that has no instances."""
    folder = write_model(root, "s", 7)
    config = text_format.Parse((folder / "config.pbtxt").read_text() + text, ModelConfig(name="s"))
    config.default_model_filename = StampBackend.default_model_filename
    source = ModelSource(folder, 1, config)
    return StampModel(source, StampBackend()), source


def write_classifier(root: Path, config: str) -> Path:
    """Two logits of the mean of embeddings; its vocabulary has two tokens."""
    folder = root / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    table = numpy_helper.from_array(np.eye(2, dtype=np.float32), "table")
    axes = numpy_helper.from_array(np.array([1]), "axes")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
        helper.make_node("ReduceMean", ["embedded", "axes"], ["logits"], keepdims=0),
    ]
    inputs = [value("input_ids", ["n", "length"], TensorProto.INT64)]
    save(graph(nodes, inputs, [value("logits", ["n", 2])], [table, axes]), folder / "1" / "model.onnx")
    return folder


COUNTING = """
import os


class TritonPythonModel:
    def initialize(self, args):
        self.path = os.path.join(args["model_repository"], "seen", args["model_instance_name"])

    def execute(self, requests):
        import triton_python_backend_utils as pb_utils

        words = [pb_utils.get_input_tensor_by_name(each, "X").as_numpy().ravel().tolist() for each in requests]
        with open(self.path, "a") as seen:
            seen.write(f"{len(requests)} {words[0]}\\n")
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
TEXT = """
backend: "python" max_batch_size: 4
input { name: "X" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "Y" data_type: TYPE_STRING dims: [ 1 ] }
instance_group { count: 2 kind: KIND_CPU }
"""


@pytest.mark.slow
async def test_every_worker_of_a_python_model_runs_every_sample(root: Path) -> None:
    folder = root / "p"
    for name in ("1", "seen"):
        (folder / name).mkdir(parents=True)
    (folder / "1" / "model.py").write_text(COUNTING)
    zeros = warmup("data_type: TYPE_STRING dims: [1] zero_data: true", 3, 2)
    (folder / "config.pbtxt").write_text(TEXT + zeros)
    repository = ModelRepository([root], ControlMode.NONE, context_for)
    await repository.start()
    assert rows(repository) == {("p", 1): READY}
    seen = {path.name: path.read_text().splitlines() for path in (folder / "seen").iterdir()}
    assert seen == {name: ["3 [b'']"] * 2 for name in ("p_0_0", "p_0_1")}
    assert repository.find("p").statistics.execution_count == 0
    await repository.close()
