from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.retriever import RetrieverBackend
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.spec import ModelSource
from tests import paths
from tests.pipelines.rag.parts import parameter
from tests.pipelines.rag.retriever.parts import CONFIG, context, load, loaded, source_of

BUNDLED = paths.MODELS / "retriever"


def test_it_is_installed() -> None:
    assert isinstance(BackendRegistry().get("retriever"), RetrieverBackend)


async def test_tensors_that_are_not_declared_are_completed(tmp_path: Path) -> None:
    config = await RetrieverBackend().complete(source_of(tmp_path), context())
    inputs = [(each.name, DataType.Name(each.data_type), list(each.dims), each.optional) for each in config.input]
    assert inputs == [("query", "TYPE_STRING", [1], False), ("query_embeddings", "TYPE_FP32", [-1], True)]
    outputs = [(each.name, list(each.dims)) for each in config.output]
    assert outputs == [("context", [-1]), ("sources", [-1]), ("encoding", [1])]


async def test_the_bundled_configuration_loads(library: DocumentLibrary) -> None:
    config = text_format.Parse((BUNDLED / "config.pbtxt").read_text(), ModelConfig())
    backend, backend_context = RetrieverBackend(library), context()
    complete = await backend.complete(ModelSource(BUNDLED, 1, config), backend_context)
    model = await backend.load(ModelSource(BUNDLED, 1, complete), backend_context)
    assert model.spec.max_batch_size == 32
    await model.close()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('input { name: "question" data_type: TYPE_STRING dims: 1 }', "declares the input 'question'; there are query"),
        ('input { name: "query" data_type: TYPE_INT32 dims: 1 }', "must be of type BYTES, got TYPE_INT32"),
        ('input { name: "query_embeddings" data_type: TYPE_FP32 dims: 4 }', "must declare the input 'query'"),
        ('output { name: "documents" data_type: TYPE_STRING dims: -1 }', "there are context, sources"),
    ],
)
async def test_tensors_that_no_retriever_has_are_refused(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(SluiceError, match=fault) as caught:
        await RetrieverBackend().complete(source_of(tmp_path, text), context())
    assert caught.value.code is ErrorCode.INVALID


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("top_k", "many", "parameter 'top_k' of model 'retriever' must be an integer from 1 to 100, got 'many'"),
        ("mode", "fast", "must be one of vector, bm25, hybrid, got 'fast'"),
        ("min_similarity", "nan", "must be a number from -1 to 1"),
        ("mmr_lambda", "1.5", "must be a number from 0 to 1"),
        ("topk", "3", "has no parameter 'topk'; there are collection, "),
    ],
)
async def test_bad_parameters_fail_the_load(
    tmp_path: Path, library: DocumentLibrary, key: str, value: str, fault: str
) -> None:
    with pytest.raises(SluiceError, match=fault) as caught:
        await load(tmp_path, library, parameter(key, value))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, key)


async def test_empty_parameters_are_as_none(tmp_path: Path, library: DocumentLibrary) -> None:
    text = "".join(parameter(key, "") for key in ("top_k", "mode", "mmr_lambda", "reranker"))
    async with loaded(tmp_path, library, text):
        pass


async def test_a_server_without_a_library_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="this server has none: set --rag-store") as caught:
        await load(tmp_path, None, config=CONFIG)
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_a_rerankers_tokenizer_that_is_not_there_fails_the_load(tmp_path: Path, library: DocumentLibrary) -> None:
    text = parameter("reranker", "ranker") + parameter("reranker_tokenizer", "../ranker/1")
    with pytest.raises(SluiceError, match="cannot load the reranker's tokenizer") as caught:
        await load(tmp_path, library, text)
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNAVAILABLE, "reranker_tokenizer")
