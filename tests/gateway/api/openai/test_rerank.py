"""Reranking and scores by a cross-encoder, by a model that takes texts, and by an encoder's vectors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sluice.pipelines.stages.tokenizer_model import TOKEN_INPUTS
from tests.gateway.api.openai.encoders import serving_process
from tests.pipelines.encoding.test_reranker import CODE, TEXTS, cross_encoder
from tests.pipelines.rag.bundled import copy_models, write_config
from tests.server_process import ServerProcess
from tests.serving.backends.python.parts import PRELUDE

pytestmark = pytest.mark.slow

QUESTION = "How long does delivery take?"
DOCUMENTS = ["The cat is on the mat.", "Shipping takes five business days.", "Delivery is free for orders over 50."]
CROSS = """
backend: "onnxruntime" max_batch_size: 2
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "token_type_ids" data_type: TYPE_INT64 dims: [ -1 ] }
]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 1 ] } ]
parameters { key: "tokenizer_model" value { string_value: "sentence_tokenizer" } }
"""


TOPICS = CROSS.replace("dims: [ 1 ] } ]", 'dims: [ 3 ] label_filename: "labels.txt" } ]')
RAW = """parameters { key: "classification_activation" value { string_value: "none" } }"""


def topics() -> onnx.ModelProto:
    """Give n - 4, 0 and 4 - n for the n tokens of a text."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", "tokens"]) for name in TOKEN_INPUTS]
    weights = [
        numpy_helper.from_array(np.array([[1, 0, -1]], np.float32), "weights"),
        numpy_helper.from_array(np.array([-4, 0, 4], np.float32), "bias"),
        numpy_helper.from_array(np.array([1], np.int64), "axis"),
    ]
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["mask", "axis"], ["count"], keepdims=1),
        helper.make_node("MatMul", ["count", "weights"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["logits"]),
    ]
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", 3])
    graph = helper.make_graph(nodes, "topics", inputs, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = copy_models(tmp_path_factory.mktemp("rerank") / "models")
    folder = write_config(root, "ranker", f'backend: "python" max_batch_size: 0{TEXTS}')
    (folder / "1" / "model.py").write_text(PRELUDE + CODE)
    onnx.save(cross_encoder(), write_config(root, "cross", CROSS) / "1" / "model.onnx")
    for name, config in (("topics", TOPICS), ("raw_topics", TOPICS + RAW)):
        folder = write_config(root, name, config)
        onnx.save(topics(), folder / "1" / "model.onnx")
        (folder / "labels.txt").write_text("long\nmiddling\n")
    with serving_process(root) as running:
        yield running


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    with server.client() as client:
        answer = client.post(path, json=body)
    return answer.json() | {"status": answer.status_code}


def encode(server: ServerProcess, *texts: str) -> Any:
    found = post(server, "/v1/embeddings", model="sentence_encoder", input=list(texts))
    return np.array([each["embedding"] for each in found["data"]]), found["usage"]["total_tokens"]


def test_an_encoder_reranks_by_the_cosine_of_its_vectors(server: ServerProcess) -> None:
    found = post(server, "/v1/rerank", model="sentence_encoder", query=QUESTION, documents=DOCUMENTS)
    vectors, num_tokens = encode(server, QUESTION, *DOCUMENTS)
    cosines = vectors[1:] @ vectors[0]
    assert [each["index"] for each in found["results"]] == list(np.argsort(-cosines))
    for each in found["results"]:
        assert each["relevance_score"] == pytest.approx(cosines[each["index"]], abs=1e-5)
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert found["model"] == "sentence_encoder" and found["id"].startswith("rerank-")


def test_a_cross_encoder_sees_pairs(server: ServerProcess) -> None:
    found = post(server, "/rerank", model="cross", query="one", documents=["two", "two words", "now three words"])
    scores = [(each["index"], each["relevance_score"]) for each in found["results"]]
    assert scores == [(2, 4.0), (1, 3.0), (0, 2.0)]  # the passage's tokens and [SEP]
    assert found["usage"]["total_tokens"] == 5 + 6 + 7
    long = post(server, "/rerank", model="cross", query="one", documents=["word " * 1_000_000])
    assert long["usage"]["total_tokens"] == 256


def test_a_model_that_takes_texts(server: ServerProcess) -> None:
    found = post(
        server, "/v1/rerank", model="ranker", query="which?", documents=["one", {"text": "two words"}], top_n=1
    )
    [best] = found["results"]
    assert best == {"index": 1, "relevance_score": 2.0, "document": {"text": "two words"}}
    failed = post(server, "/v1/rerank", model="ranker", query="fail", documents=["one"])
    assert failed["status"] >= 500 and "reranker 'ranker': " in failed["error"]["message"]


def test_the_shape_of_coheres_second_version(server: ServerProcess) -> None:
    body = {"model": "ranker", "query": "which?", "documents": ["one", "two words"]}
    found = post(server, "/v2/rerank", **body)
    assert found["results"] == [{"index": 1, "relevance_score": 2.0}, {"index": 0, "relevance_score": 1.0}]
    assert found["meta"] == {"api_version": {"version": "2"}}
    assert post(server, "/v2/rerank", **body, return_documents=True)["results"][0]["document"]["text"] == "two words"
    unknown = post(server, "/v2/rerank", **{**body, "model": "nope"})
    assert unknown["status"] == 404 and unknown["error"]["code"] == "model_not_found"


def test_classes_have_vllms_shape(server: ServerProcess) -> None:
    texts = ["one", "one two", "one two three four"]
    found = post(server, "/classify", model="topics", input=texts)
    assert [each["label"] for each in found["data"]] == ["LABEL_2", "long", "long"]  # equal ones: the first
    for each, logit in zip(found["data"], (-1, 0, 2), strict=True):
        powers = np.exp([logit, 0, -logit])
        assert each["probs"] == pytest.approx(powers / powers.sum(), abs=1e-6)
        assert each["num_classes"] == 3
    assert found["object"] == "list" and found["id"].startswith("classify-")
    assert found["usage"] == {"prompt_tokens": 13, "total_tokens": 13, "completion_tokens": 0}
    for one in (
        post(server, "/classify", model="topics", input=texts[2], use_activation=False),
        post(server, "/classify", model="raw_topics", input=[*texts, texts[2]], truncate_prompt_tokens=6),
    ):
        assert one["data"][-1]["probs"] == [2, 0, -2]
    cut = post(server, "/classify", model="raw_topics", input=texts, truncate_prompt_tokens=4)
    assert [each["probs"][0] for each in cut["data"]] == [-1, 0, 0]
    with server.client() as client:
        assert {"topics", "raw_topics"} <= {each["id"] for each in client.get("/v1/models").json()["data"]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "sentence_encoder"}, "has no output with labels; models that classify texts: raw_topics, topics"),
        ({"model": "cross"}, "model 'cross' has no output with labels"),
        ({"model": "topics", "input": "word " * 300}, "input has more tokens than the 256"),
        ({"model": "topics", "input": []}, "input must not be empty"),
        ({"model": "topics", "use_activation": 1}, "use_activation must be a valid boolean, got 1"),
    ],
)
def test_what_cannot_be_classified_is_refused(server: ServerProcess, body: dict[str, Any], message: str) -> None:
    refused = post(server, "/classify", **{"input": "x", **body})
    assert refused["status"] == 400 and message in refused["error"]["message"]
    assert "no embeddings" in post(server, "/v1/embeddings", model="topics", input="x")["error"]["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_one_question_and_of_pairs(server: ServerProcess, path: str) -> None:
    one = post(server, path, model="cross", text_1="one", text_2=["two", "two words"])
    assert [(each["index"], each["object"], each["score"]) for each in one["data"]] == [
        (0, "score", 2.0),
        (1, "score", 3.0),
    ]
    assert one["object"] == "list" and one["usage"]["prompt_tokens"] == 5 + 6
    pairs = post(server, path, model="sentence_encoder", text_1=[QUESTION, "cats", QUESTION], text_2=DOCUMENTS)
    vectors, _ = encode(server, QUESTION, "cats", *DOCUMENTS)
    expected = [vectors[0] @ vectors[2], vectors[1] @ vectors[3], vectors[0] @ vectors[4]]
    assert [each["score"] for each in pairs["data"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/rerank", {"documents": []}, "documents", "documents must not be empty"),
        ("/v1/rerank", {"documents": ["x"] * 2049}, "documents", "documents must have at most 2048 elements, got 2049"),
        ("/v1/rerank", {"documents": [5]}, "documents[0]", 'documents[0] must be a string or an object {"text": ...}'),
        ("/v1/rerank", {"documents": [{}]}, "documents[0].text", "documents[0].text is required"),
        ("/v1/rerank", {"query": ""}, "query", "query must not be empty"),
        ("/v2/rerank", {"top_n": -1}, "top_n", "top_n must be greater than or equal to 0, got -1"),
        (
            "/rerank",
            {"model": "sentence_tokenizer"},
            "model",
            "model 'sentence_tokenizer' does not score texts; models that",
        ),
        ("/score", {"text_1": ["a", "b"]}, "text_1", "text_1 must have 1 text, or as many as text_2 (1), got 2"),
        ("/score", {"text_2": []}, "text_2", "text_2 must not be empty"),
    ],
)
def test_what_is_wrong_is_named(
    server: ServerProcess, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    whole = {"text_1": "x", "text_2": "y"} if path == "/score" else {"query": "x", "documents": ["y"]}
    found = post(server, path, **{"model": "sentence_encoder", **whole, **body})
    assert (found["status"], found["error"]["param"]) == (400, param)
    assert found["error"]["message"].startswith(message)


def test_rerankers_are_listed(server: ServerProcess) -> None:
    with server.client() as client:
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert client.get("/v1/models/cross").json()["id"] == "cross"
    assert names == ["query_encoder", "sentence_encoder", "cross", "ranker", "raw_topics", "topics"]
