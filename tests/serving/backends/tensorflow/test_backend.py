"""SavedModels and frozen graphs give TensorFlow's results, under the names of their signatures."""

import asyncio
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.tensorflow.backend import TensorFlowBackend
from sluice.serving.backends.tensorflow.saved_model import parse_saved_model, read_saved_model
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Array
from tests import paths
from tests.serving.backends.builders import CONTEXT, infer, parameters, request

DATA = paths.DATA / "tensorflow"
SAVED_MODEL, GRAPH = "tensorflow_savedmodel", "tensorflow_graphdef"
Arrays = dict[str, Array]


def put(folder: Path, name: str, text: str = "", platform: str = SAVED_MODEL) -> ModelSource:
    """Write version 1 of a model."""
    shutil.copytree(DATA / name, folder / "1", dirs_exist_ok=True)
    filename = "model.savedmodel" if platform == SAVED_MODEL else "model.graphdef"
    given = ModelConfig(name="m", backend="tensorflow", platform=platform, default_model_filename=filename)
    return ModelSource(folder, 1, text_format.Parse(text, given))


async def complete(folder: Path, name: str, text: str = "", platform: str = SAVED_MODEL) -> ModelConfig:
    return await TensorFlowBackend().complete(put(folder, name, text, platform), CONTEXT)


async def load(folder: Path, name: str, text: str = "", platform: str = SAVED_MODEL) -> Model:
    config = await complete(folder, name, text, platform)
    return await TensorFlowBackend().load(ModelSource(folder, 1, config), CONTEXT)


def recorded(name: str, signature: str = "serving_default") -> tuple[Arrays, Arrays]:
    """Return the recorded inputs and TensorFlow's outputs for them."""
    with np.load(DATA / name / "answers.npz") as answers:
        sides = [
            {key.removeprefix(start): answers[key] for key in answers.files if key.startswith(start)}
            for start in (f"{signature}/in/", f"{signature}/out/")
        ]
    return sides[0], sides[1]


def assert_equal(answer: Arrays, expected: Arrays) -> None:
    assert answer.keys() == expected.keys()
    for name, array in expected.items():
        assert (answer[name].dtype, answer[name].shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(answer[name], array, rtol=1e-5, atol=1e-6)


async def test_a_saved_model_is_completed_from_its_signature(tmp_path: Path) -> None:
    config = await complete(tmp_path, "dense")
    assert config.max_batch_size == 4
    assert config.HasField("dynamic_batching")
    assert [(each.name, list(each.dims)) for each in config.input] == [("features", [8])]
    assert {each.name: list(each.dims) for each in config.output} == {"scores": [4], "best": [1]}
    best = next(each for each in config.output if each.name == "best")
    assert (best.HasField("reshape"), list(best.reshape.shape)) == (True, [])


async def test_variables_are_read(tmp_path: Path, loaded: list[Model]) -> None:
    inputs, expected = recorded("dense")
    loaded.append(model := await load(tmp_path, "dense"))
    answer = await infer(model, request(**inputs))
    answer["best"] = answer["best"][:, 0]
    assert_equal(answer, expected)


async def test_batches(tmp_path: Path, loaded: list[Model]) -> None:
    inputs, expected = recorded("dense")
    loaded.append(model := await load(tmp_path, "dense"))
    answers = await asyncio.gather(*(infer(model, request(features=row[None])) for row in inputs["features"]))
    assert model.statistics.execution_count == 1
    np.testing.assert_allclose(np.concatenate([each["scores"] for each in answers]), expected["scores"], rtol=1e-5)


async def test_names_are_the_signature_s_whatever_their_order(tmp_path: Path, loaded: list[Model]) -> None:
    inputs, expected = recorded("swapped")
    loaded.append(model := await load(tmp_path, "swapped"))
    assert_equal(await infer(model, request(**inputs)), expected)


async def test_control_flow_scalars_and_inputs_that_nothing_reads(tmp_path: Path, loaded: list[Model]) -> None:
    inputs, expected = recorded("loop")
    loaded.append(model := await load(tmp_path, "loop"))
    assert model.spec.inputs.keys() == {"start", "count", "unread"}
    assert_equal(await infer(model, request(**inputs | {"count": inputs["count"].reshape(1)})), expected)


async def test_another_signature(tmp_path: Path, loaded: list[Model]) -> None:
    inputs, expected = recorded("dense", "hidden_layer")
    loaded.append(model := await load(tmp_path, "dense", parameters(TF_SIGNATURE_DEF="hidden_layer")))
    assert_equal(await infer(model, request(**inputs)), expected)


async def test_another_graph_by_its_tag(tmp_path: Path, loaded: list[Model]) -> None:
    source = put(tmp_path, "swapped")
    file = source.model_file / "saved_model.pb"
    message = parse_saved_model(file.read_bytes())
    message.meta_graphs[0].meta_info_def.tags[:] = ["other"]
    file.write_bytes(message.SerializeToString())
    assert read_saved_model(source.model_file).inputs == read_saved_model(source.model_file, "other").inputs
    with pytest.raises(SluiceError, match="no graph with the tag 'third'; it has: other"):
        read_saved_model(source.model_file, "third")
    source.config.parameters["TF_GRAPH_TAG"].string_value = "other"
    backend = TensorFlowBackend()
    config = await backend.complete(source, CONTEXT)
    loaded.append(model := await backend.load(ModelSource(tmp_path, 1, config), CONTEXT))
    inputs, expected = recorded("swapped")
    assert_equal(await infer(model, request(**inputs)), expected)


async def test_a_signature_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(SluiceError) as caught:
        await load(tmp_path, "dense", parameters(TF_SIGNATURE_DEF="q"))
    assert caught.value.message == "the SavedModel has no signature 'q'; it has: hidden_layer, serving_default"


async def test_an_operation_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    with pytest.raises(SluiceError) as caught:
        await load(tmp_path, "jpeg")
    assert caught.value.code is ErrorCode.UNIMPLEMENTED
    assert caught.value.message == "OpenVINO cannot convert these operations of the model: DecodeJpeg"


async def test_a_folder_that_is_no_saved_model_says_so(tmp_path: Path) -> None:
    file = put(tmp_path, "dense").model_file / "saved_model.pb"
    file.write_bytes(b"\xff\xff")
    with pytest.raises(SluiceError, match=r"saved_model\.pb' cannot be read"):
        read_saved_model(file.parent)
    file.unlink()
    with pytest.raises(SluiceError, match="is no SavedModel"):
        read_saved_model(file.parent)


ADD_SUB = """max_batch_size: 4
    input { name: "INPUT1" data_type: TYPE_FP32 dims: [4] } input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
    output { name: "OUTPUT1" data_type: TYPE_FP32 dims: [4] } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }
"""


async def test_a_graph_ends_where_the_configuration_says(tmp_path: Path, loaded: list[Model]) -> None:
    inputs, expected = recorded("graphdef", "")
    loaded.append(model := await load(tmp_path, "graphdef", ADD_SUB, GRAPH))
    assert_equal(await infer(model, request(**inputs)), expected)


async def test_a_graph_begins_where_the_configuration_says(tmp_path: Path, loaded: list[Model]) -> None:
    text = """max_batch_size: 4 output { name: "product:0" data_type: TYPE_FP32 dims: [4] }
        input { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }
        input { name: "OUTPUT1" data_type: TYPE_FP32 dims: [4] }"""
    loaded.append(model := await load(tmp_path, "graphdef", text, GRAPH))
    row = np.array([[1, 2, 3, 4]], np.float32)
    assert (await infer(model, request(OUTPUT0=row, OUTPUT1=row)))["product:0"].tolist() == [[1, 4, 9, 16]]


async def test_a_graph_is_completed_from_its_ends(tmp_path: Path) -> None:
    config = await complete(tmp_path, "graphdef", platform=GRAPH)
    assert [each.name for each in config.input] == ["INPUT0", "INPUT1"]
    assert [each.name for each in config.output] == ["product"]


async def test_a_graph_s_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(SluiceError) as caught:
        await load(tmp_path, "graphdef", ADD_SUB.replace("OUTPUT1", "q"), GRAPH)
    assert caught.value.message == "the graph has no tensor 'q'"


async def test_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend, source = TensorFlowBackend(), put(tmp_path, "dense", parameters(TF_NUM_INTRA_THREADS="1"))
    assert backend.options(source.config).properties == {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": "1",
    }
    with pytest.raises(SluiceError, match="'TF_NUM_INTRA_THREADS' to be a non-negative number, got x"):
        backend.options(put(tmp_path, "dense", parameters(TF_NUM_INTRA_THREADS="x")).config)
    with pytest.raises(SluiceError, match="'TF_INIT_OPS_FILE': graphs are served frozen"):
        backend.options(put(tmp_path, "dense", parameters(TF_INIT_OPS_FILE="init_ops.json")).config)
    with caplog.at_level(logging.WARNING):
        backend.options(put(tmp_path, "dense", parameters(TF_NUM_INTER_THREADS="2")).config)
    assert "not obeyed: TF_NUM_INTER_THREADS" in caplog.text
