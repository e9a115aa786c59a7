import asyncio
from pathlib import Path

import numpy as np
import orjson
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.retriever import RetrieverModel
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import CandidateHits, CandidateQuery, CollectionSpec
from sluice.serving.model import infer_one
from sluice.serving.request import InferResponse
from tests.pipelines.rag.parts import parameter
from tests.pipelines.rag.retriever.conftest import TEXTS
from tests.pipelines.rag.retriever.parts import CONFIG, DIM, ask, documents, library_of, loaded, request
from tests.waiting import PATIENCE_S, until

QUEUE, CANCEL, SHIP = np.eye(DIM)[:3].tolist()


async def refusal(model: RetrieverModel, *questions: str, vectors: object = None, **parameters: object) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await ask(model, questions or ("What?",), vectors, **parameters)  # type: ignore[arg-type]
    return caught.value


# -- what is found


async def test_chunks_come_best_first_with_their_sources(model: RetrieverModel) -> None:
    found = await ask(model, ["When are blocks free?"], [CANCEL], top_k=2)
    assert found["context"] == [[TEXTS["cancel"], TEXTS["queue"]]]
    first = orjson.loads(found["sources"][0][0])
    assert first.pop("score") > 0
    assert first == {
        "document": "cancel",
        "title": "Cancel",
        "heading": "Use",
        "start": 0,
        "end": len(TEXTS["cancel"]),
        "similarity": 1.0,
        "metadata": {"kind": "c"},
        "text": TEXTS["cancel"],
    }


async def test_rows_are_searched_on_their_own_and_filled_up(model: RetrieverModel) -> None:
    found = await ask(model, ["shipping", "zzz", "queue"], [SHIP, SHIP, QUEUE], mode="bm25")
    assert documents(found["sources"]) == [["ship"], [], ["queue"]]
    assert found["context"] == [[TEXTS["ship"]], [""], [TEXTS["queue"]]]


async def test_nothing_found_is_no_element(model: RetrieverModel) -> None:
    found = await ask(model, ["anything"], [SHIP], collection="new")
    assert found == {"context": [[]], "sources": [[]], "encoding": [[""]]}


async def test_modes_and_filters(model: RetrieverModel) -> None:
    assert documents((await ask(model, ["queue"], [SHIP], mode="vector", top_k=1))["sources"]) == [["ship"]]
    assert documents((await ask(model, ["queue"], [SHIP], mode="bm25", top_k=1))["sources"]) == [["queue"]]
    assert documents((await ask(model, ["queue"], [SHIP], filter='{"kind": "c"}'))["sources"]) == [["cancel"]]
    strict = await ask(model, ["zzz"], [SHIP], min_similarity=0.5)
    assert documents(strict["sources"]) == [["ship"]]


async def test_without_a_vector_the_collections_encoder_makes_it(model: RetrieverModel) -> None:
    found = await ask(model, ["xx"], mode="vector", top_k=1)  # the letter x stands for direction 0
    assert documents(found["sources"]) == [["queue"]]


async def test_the_length_of_a_vector_does_not_matter(model: RetrieverModel) -> None:
    found = await ask(model, ["zzz"], [[0.0, 0.0, 25.0, 0.0]], mode="vector", top_k=1)
    assert orjson.loads(found["sources"][0][0])["similarity"] == 1.0


async def test_a_model_without_a_batch_dimension(tmp_path: Path, library: DocumentLibrary) -> None:
    async with loaded(tmp_path, library, config='name: "retriever" backend: "retriever" ') as model:
        asked = request(["shipping"], [SHIP], top_k=1)
        asked.inputs = {name: each.reshaped(each.shape[1:]) for name, each in asked.inputs.items()}
        response = await infer_one(model, asked)
    assert [(each.name, each.shape) for each in response.outputs] == [
        *(("context", (1,)), ("sources", (1,)), ("encoding", (1,)))
    ]
    assert response.outputs[0].array.tolist() == [TEXTS["ship"].encode()]


async def test_only_what_is_wanted_comes(model: RetrieverModel) -> None:
    asked = request(["shipping"], [SHIP])
    asked.requested_outputs = ("sources",)
    assert [each.name for each in (await infer_one(model, asked)).outputs] == ["sources"]


async def test_configuration_holds_where_a_request_says_nothing(tmp_path: Path, library: DocumentLibrary) -> None:
    text = parameter("collection", "mine") + parameter("top_k", "1") + parameter("mode", "bm25")
    async with loaded(tmp_path, library, text) as model:
        found = await ask(model, ["blocks"], collection_key="open sesame")
        assert len(found["sources"][0]) == 1
        assert len((await ask(model, ["blocks"], collection="docs", top_k=5))["sources"][0]) == 2


async def test_another_collection_is_searched_until_the_usual_one_is_there(
    tmp_path: Path, library: DocumentLibrary, store: SqliteStore
) -> None:
    text = parameter("collection", "yours") + parameter("fallback_collection", "docs") + parameter("mode", "bm25")
    async with loaded(tmp_path, library, text) as model:
        assert len((await ask(model, ["blocks"]))["sources"][0]) == 2
        assert (await refusal(model, collection="yours")).code is ErrorCode.NOT_FOUND
        await store.create_collection(CollectionSpec("yours", "query_encoder", DIM))
        assert (await ask(model, ["blocks"]))["sources"][0] == []


# -- owners


async def test_an_owners_key_opens_a_collection(model: RetrieverModel) -> None:
    found = await ask(model, ["queue"], [QUEUE], collection="mine", collection_key="open sesame", top_k=1)
    assert documents(found["sources"]) == [["queue"]]
    for key in ("", "wrong"):
        error = await refusal(model, "queue", vectors=[QUEUE], collection="mine", collection_key=key)
        assert (error.code, error.param) == (ErrorCode.FORBIDDEN, "collection")
        assert "wrong" not in error.message


async def test_an_unknown_collection_names_those_that_the_caller_may_open(model: RetrieverModel) -> None:
    error = await refusal(model, collection="doc")
    assert (error.code, error.param) == (ErrorCode.NOT_FOUND, "collection")
    assert error.message == "parameter 'collection': there is no collection 'doc'; there are docs, new"
    assert "mine" in (await refusal(model, collection="doc", collection_key="open sesame")).message


# -- what is refused

_VECTOR = ("query_embeddings", "")


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"top_k": 0}, "top_k", "parameter 'top_k' must be an integer from 1 to 100, got 0"),
        ({"top_k": 101}, "top_k", "parameter 'top_k' must be an integer from 1 to 100, got 101"),
        ({"top_k": "5"}, "top_k", "parameter 'top_k' must be an integer from 1 to 100, got '5'"),
        ({"top_k": True}, "top_k", "parameter 'top_k' must be an integer from 1 to 100, got True"),
        ({"mode": "magic"}, "mode", "parameter 'mode' must be one of vector, bm25, hybrid, got 'magic'"),
        ({"collection": 5}, "collection", "parameter 'collection' must be a string"),
        ({"collection_key": False}, "collection_key", "parameter 'collection_key' must be a string"),
        ({"filter": 1.5}, "filter", "parameter 'filter' must be a string"),
        ({"filter": "{"}, "filter", ""),
        (
            {"num_candidates": 0},
            "num_candidates",
            "parameter 'num_candidates' must be an integer from 1 to 1000, got 0",
        ),
        ({"min_similarity": 2}, "min_similarity", "parameter 'min_similarity' must be a number from -1 to 1, got 2"),
        ({"mmr_lambda": -0.5}, "mmr_lambda", "parameter 'mmr_lambda' must be a number from 0 to 1, got -0.5"),
        ({"vectors": [[1.0, 0.0]]}, "query_embeddings", "collection 'docs' holds vectors of 4, made by the model"),
        ({"vectors": [[0.0] * DIM]}, *_VECTOR),
        ({"vectors": [[float("nan")] * DIM]}, *_VECTOR),
        ({"vectors": [[float("inf"), 0, 0, 0]]}, *_VECTOR),
        ({"vectors": [[]]}, *_VECTOR),
        ({"question": " "}, "query", ""),
    ],
)
async def test_what_is_refused_names_its_parameter(
    model: RetrieverModel, asked: dict[str, object], param: str, said: str
) -> None:
    given = {"question": "What?"} | asked
    error = await refusal(model, str(given.pop("question")), **given)
    assert (error.code, error.param) == (ErrorCode.INVALID, param)
    assert said in error.message


# -- stores that fail, cancellation, statistics


class Switched(SqliteStore):
    """A store that can be down, and that can block searches."""

    is_down = False
    held: asyncio.Event | None = None
    num_cancelled = 0
    num_searches = 0

    async def candidates(self, collection: str, query: CandidateQuery) -> CandidateHits:
        self.num_searches += 1
        if self.is_down:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"{self.name} cannot be reached", retry_after_s=1.0)
        try:
            if self.held is not None:
                await self.held.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return await super().candidates(collection, query)


@pytest.fixture
async def switched(tmp_path: Path) -> Switched:
    store = Switched(tmp_path / "switched.sqlite")
    await store.open()
    await store.create_collection(CollectionSpec("docs", "query_encoder", DIM))
    return store


async def test_a_store_that_is_down_is_named_with_the_model_until_it_is_back(
    tmp_path: Path, switched: Switched
) -> None:
    switched.is_down = True
    async with loaded(tmp_path, library_of(switched)) as model:
        error = await refusal(model, vectors=[SHIP])
        assert (error.code, error.retry_after_s) == (ErrorCode.UNAVAILABLE, 1.0)
        assert error.message == f"model 'retriever': {switched.name} cannot be reached"
        assert model.statistics.infer.fail.count == 1
        switched.is_down = False
        assert (await ask(model, ["?"], [SHIP]))["context"] == [[]]
    await switched.close()


async def test_a_reranker_that_does_not_serve_is_named(tmp_path: Path, library: DocumentLibrary) -> None:
    async with loaded(tmp_path, library, parameter("reranker", "ranker")) as model:
        error = await refusal(model, "queue", vectors=[QUEUE])
    assert error.code is ErrorCode.UNAVAILABLE
    assert error.message.startswith("model 'retriever': reranker 'ranker': ")


async def test_cancellation_ends_every_search(tmp_path: Path, switched: Switched) -> None:
    switched.held = asyncio.Event()
    async with loaded(tmp_path, library_of(switched)) as model:
        answers: list[InferResponse] = []
        job = model.submit(request(["a", "b"], [SHIP, SHIP]), answers.append)
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: switched.num_searches >= 2)
            job.cancel()
            await model.wait_idle()
        assert switched.num_cancelled == 2
        assert answers == []
        at_once = model.submit(request(["a"], [SHIP]), answers.append)
        at_once.cancel()
        await model.wait_idle()
        assert model.statistics.failures["CANCELED"] == 2  # type: ignore[index]
    await switched.close()


async def test_closing_ends_what_is_under_way(tmp_path: Path, switched: Switched) -> None:
    switched.held = asyncio.Event()
    async with loaded(tmp_path, library_of(switched)) as model:
        answers: list[InferResponse] = []
        model.submit(request(["a"], [SHIP]), answers.append)
        await model.close()
        assert [each.error and each.error.code for each in answers] == [ErrorCode.CANCELLED]
    await switched.close()


async def test_a_request_counts_as_one_execution_with_its_rows(model: RetrieverModel) -> None:
    await ask(model, ["a", "b"], [SHIP, SHIP])
    await refusal(model, top_k=0)
    statistics = model.statistics
    assert (statistics.inference_count, statistics.execution_count) == (2, 1)
    assert (statistics.infer.success.count, statistics.infer.fail.count) == (1, 0)
    assert statistics.infer.compute_infer.ns > 0


async def test_a_batch_may_not_be_larger_than_the_model_takes(tmp_path: Path, library: DocumentLibrary) -> None:
    async with loaded(tmp_path, library, config=CONFIG.replace("32", "2")) as model:
        error = await refusal(model, "a", "b", "c", vectors=[SHIP] * 3)
    assert error.code is ErrorCode.INVALID
