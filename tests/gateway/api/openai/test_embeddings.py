"""Embeddings by the stock client, beside those of the v2 protocol and of retrieval."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest
import tokenizers
import tritonclient.http

from sluice.gateway.api.openai.encoders import MAX_INPUTS
from sluice.pipelines.encoding.encoder import TextEncoder
from tests.gateway.api.openai.encoders import add_copy, serving_process
from tests.paths import MODELS
from tests.pipelines.encoding.test_encoder import SENTENCES
from tests.pipelines.encoding.test_llm_encoder import write_sentence_files
from tests.pipelines.rag.bundled import copy_models, serving
from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

TOKENIZER = tokenizers.Tokenizer.from_file(str(MODELS / "sentence_tokenizer" / "1" / "tokenizer.json"))
TOKENIZER.no_padding()
TOKENIZER.no_truncation()
LONG = "word " * 300
"""More than the 256 tokens that the encoder takes."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embeddings") / "models"
    add_copy(root, "sentence_encoder", "nested", matryoshka_dimensions="64, 128")
    write_sentence_files(add_copy(root, "rill", "rill_embedder") / "1")
    add_copy(root, "query_encoder", "prefixed", query_prefix="query: ", document_prefix="passage: ")
    config = add_copy(root, "sentence_encoder", "crowded") / "config.pbtxt"
    levels = "default_priority_level: 1"
    config.write_text(config.read_text().replace(levels, f"{levels} default_queue_policy {{ max_queue_size: 1 }}"))
    return copy_models(root)


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    store = str(root.parent / "rag.sqlite")
    with serving_process(root, "--http-max-input-size", "9000000", "--rag-store", store) as running:
        yield running


@pytest.fixture(scope="module")
def stock(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_a_language_model_encodes_a_collection(server: ServerProcess) -> None:
    path = "/v1/rag/collections"
    with server.client() as client:
        made = client.post(path, json={"name": "lm", "encoder": "rill_embedder"})
        assert made.status_code == 201, made.text
        texts = ["Rings are round.", "A ling is a fish.", "Lists keep their order."]
        for number, text in enumerate(texts):
            put = client.put(f"/v1/rag/lm/documents/{number}", content=text, headers={"content-type": "text/plain"})
            assert put.status_code == 201, put.text
        body = {"question": texts[1], "top_k": 3, "mode": "vector"}
        hits = client.post("/v1/rag/lm/search", json=body).json()["data"]
    assert {hit["document"] for hit in hits} == {"0", "1", "2"}
    assert hits[0]["similarity"] == max(hit["similarity"] for hit in hits)


def vectors(found: openai.types.CreateEmbeddingResponse) -> np.ndarray[Any, Any]:
    assert [each.index for each in found.data] == list(range(len(found.data)))
    return np.array([each.embedding for each in found.data], np.float32)


def refusal(server: ServerProcess, path: str = "/v1/embeddings", **body: Any) -> tuple[int, str, str]:
    with server.client() as client:
        answer = client.post(path, json={"model": "sentence_encoder", "input": "x"} | body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


@pytest.fixture(scope="module")
def retrieved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The vectors that retrieval has of the sentences."""

    async def retrieval() -> Any:
        async with serving(copy_models(tmp_path_factory.mktemp("bundled"))) as models:
            return await TextEncoder(models, "query_encoder").encode_documents(SENTENCES)

    return asyncio.run(retrieval())


@pytest.mark.parametrize("model", ["sentence_encoder", "query_encoder"])
def test_texts_have_the_vectors_of_retrieval_and_of_v2(
    server: ServerProcess, stock: openai.OpenAI, retrieved: Any, model: str
) -> None:
    found = stock.embeddings.create(model=model, input=SENTENCES, extra_body={"truncate_prompt_tokens": -1})
    assert np.abs(vectors(found) - retrieved).max() < 1e-5
    client = tritonclient.http.InferenceServerClient(server.base_url.removeprefix("http://"))
    texts = tritonclient.http.InferInput("text", [40, 1], "BYTES")
    texts.set_data_from_numpy(np.array([[each.encode()] for each in SENTENCES[:40]], np.object_))
    by_v2 = client.infer("query_encoder", [texts]).as_numpy("embeddings")
    client.close()
    assert np.abs(vectors(found)[:40] - by_v2).max() < 1e-5
    count = sum(min(256, len(each.ids)) for each in TOKENIZER.encode_batch(SENTENCES))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (count, count)
    assert (found.object, found.model, found.data[0].object) == ("list", model, "embedding")


def test_every_kind_of_input_and_of_encoding(server: ServerProcess, stock: openai.OpenAI) -> None:
    ids = [TOKENIZER.encode(text).ids for text in ("hello world", "hi")]
    whole = vectors(stock.embeddings.create(model="sentence_encoder", input=["hello world", "hi"]))
    for encoding in ("float", "base64"):
        for given, expected, num_tokens in (
            (ids, whole, 7),
            (ids[0], whole[:1], 4),
            ("hello world", whole[:1], 4),
            (["hi"], whole[1:], 3),
        ):
            body = {"model": "sentence_encoder", "input": given, "encoding_format": encoding, "user": "me"}
            with server.client() as client:
                answer = client.post("/v1/embeddings", json=body).json()
            read = [each["embedding"] for each in answer["data"]]
            if encoding == "base64":
                read = [np.frombuffer(base64.b64decode(each), "<f4") for each in read]
            assert np.abs(np.array(read) - expected).max() < 1e-5
            assert answer["usage"]["total_tokens"] == num_tokens


def test_ollamas_client_gets_the_same_vectors(server: ServerProcess, stock: openai.OpenAI) -> None:
    whole = vectors(stock.embeddings.create(model="sentence_encoder", input=["hello world", "hi"]))
    with ollama.Client(server.base_url, timeout=PATIENCE_S) as client:
        found = client.embed("sentence_encoder:latest", ["hello world", "hi"])
        alone = client.embed("sentence_encoder", "hello world")
        old = client.embeddings("sentence_encoder", "hello world")
        assert (found.prompt_eval_count, alone.prompt_eval_count) == (7, 4)
        assert np.abs(np.array(found.embeddings) - whole).max() < 1e-5
        assert np.abs(np.array([*alone.embeddings, old.embedding]) - whole[:1]).max() < 1e-5
        assert len(client.embed("nested", LONG, dimensions=64).embeddings[0]) == 64
        with pytest.raises(ollama.ResponseError, match="input has more tokens than the 256"):
            client.embed("nested", LONG, truncate=False)
        assert client.show("sentence_encoder").capabilities == ["embedding"]
        assert {each.model for each in client.list().models} >= {"sentence_encoder:latest", "nested:latest"}


@pytest.mark.parametrize("model", ["sentence_encoder", "query_encoder", "rill_embedder"])
def test_inputs_are_cut_to_a_number_of_tokens(server: ServerProcess, stock: openai.OpenAI, model: str) -> None:
    long, short = "one two three four five six", "one two three"
    with server.client() as client:
        sent = {"model": model, "prompt": short}
        most = len(client.post("/tokenize", json=sent).json()["tokens"])
    cut = stock.embeddings.create(model=model, input=[long], extra_body={"truncate_prompt_tokens": most})
    whole = vectors(stock.embeddings.create(model=model, input=short))
    assert np.abs(vectors(cut) - whole).max() < (0.01 if model == "rill_embedder" else 1e-5)
    assert cut.usage.prompt_tokens == most


def test_an_encoder_that_takes_text_takes_the_token_ids_of_one(stock: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("hello world").ids
    for sent in (ids, ids[1:-1]):
        found = vectors(stock.embeddings.create(model="query_encoder", input=sent))
        assert np.abs(found - vectors(stock.embeddings.create(model="query_encoder", input="hello world"))).max() < 1e-5


def test_a_language_model_embeds(server: ServerProcess, stock: openai.OpenAI) -> None:
    texts = ["one", "a much longer text of pumps", "one"]
    found = vectors(stock.embeddings.create(model="rill_embedder", input=texts))
    assert found.shape == (3, 320)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-3
    assert np.abs(found[0] - found[2]).max() < 0.01 < np.abs(found[0] - found[1]).max()
    with server.client() as client:
        tokens = client.post("/tokenize", json={"model": "rill_embedder", "prompt": texts[1]}).json()["tokens"]
        scored = client.post("/v1/score", json={"model": "rill_embedder", "text_1": "one", "text_2": "one"}).json()
        chat = client.post("/v1/completions", json={"model": "rill_embedder", "prompt": "x"})
        v2 = client.post("/v2/models/rill_embedder/generate", json={"text_input": "x"})
    by_ids = vectors(stock.embeddings.create(model="rill_embedder", input=tokens))
    assert np.abs(by_ids[0] - found[1]).max() < 0.01
    assert scored["data"][0]["score"] == pytest.approx(1, abs=1e-3)
    for refused in (chat, v2):
        assert refused.status_code == 400
        assert "gives embeddings and no text; POST /v1/embeddings" in refused.text
    assert {each.id for each in stock.models.list()} >= {"rill_embedder", "sentence_encoder"}


def test_as_many_inputs_as_openai_takes(stock: openai.OpenAI) -> None:
    texts = [f"{number} pumps" for number in range(MAX_INPUTS)]
    found = vectors(stock.embeddings.create(model="sentence_encoder", input=texts, encoding_format="float"))
    [alone] = vectors(stock.embeddings.create(model="sentence_encoder", input=texts[1000]))
    assert found.shape == (MAX_INPUTS, 384)
    assert np.abs(found[1000] - alone).max() < 1e-5


def test_vectors_are_cut_where_the_model_allows(server: ServerProcess, stock: openai.OpenAI) -> None:
    whole = vectors(stock.embeddings.create(model="nested", input=["hello"]))
    [cut] = vectors(stock.embeddings.create(model="nested", input="hello", dimensions=64))
    assert np.allclose(cut, whole[0, :64] / np.linalg.norm(whole[0, :64]), atol=1e-6)
    assert vectors(stock.embeddings.create(model="sentence_encoder", input="x", dimensions=384)).shape == (1, 384)
    assert refusal(server, dimensions=64)[1:] == (
        "dimensions",
        "dimensions must be the model's 384 for 'sentence_encoder', got 64: its vectors are not made to be cut "
        "(parameter 'matryoshka_dimensions')",
    )
    assert "must be among 64, 128 for 'nested', got 65" in refusal(server, model="nested", dimensions=65)[2]


def test_texts_get_the_prefix_of_their_type(stock: openai.OpenAI) -> None:
    def encode(text: str, model: str = "prefixed", **more: str) -> Any:
        return vectors(stock.embeddings.create(model=model, input=text, extra_body=more))[0]

    assert np.allclose(encode("x", input_type="query"), encode("query: x", "query_encoder"), atol=1e-5)
    assert np.allclose(encode("x", input_type="passage"), encode("passage: x", "query_encoder"), atol=1e-5)
    assert np.allclose(encode("x"), encode("x", "query_encoder"), atol=1e-5)


def test_what_is_too_long_is_cut_only_if_asked(server: ServerProcess, stock: openai.OpenAI) -> None:
    message = (
        "input[1] has more tokens than the 256 that the model takes; shorten it, or send truncate_prompt_tokens: -1"
    )
    for model in ("sentence_encoder", "query_encoder"):
        assert refusal(server, model=model, input=["x", LONG]) == (400, "input[1]", message)
        found = stock.embeddings.create(model=model, input=LONG, extra_body={"truncate_prompt_tokens": -1})
        assert found.usage.prompt_tokens == 256
    assert refusal(server, input=[[5], [5] * 257]) == (400, "input[1]", message)
    assert refusal(server, input=LONG)[2].startswith("input has more tokens")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "input must not be empty"),
        ({"input": ["x"] * 2049}, "input", "input must have at most 2048 elements, got 2049"),
        ({"input": ["x", 5]}, "input[1]", "input[1] must be a valid string, got 5"),
        ({"input": [[5], [-1]]}, "input[1][0]", "input[1][0] must be a token id from 0 to 30521, got -1"),
        ({"input": [5] * 20 + [30522]}, "input[20]", "input[20] must be a token id from 0 to 30521, got 30522"),
        ({"input": None}, "input", "input must be a string, an array of strings"),
        ({"encoding_format": "hex"}, "encoding_format", "encoding_format must be 'float' or 'base64', got \"hex\""),
        ({"dimensions": 0}, "dimensions", "dimensions must be greater than or equal to 1, got 0"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1"),
        (
            {"truncate_prompt_tokens": 257},
            "truncate_prompt_tokens",
            "truncate_prompt_tokens must be at most 256, what the",
        ),
        ({"model": "query_encoder", "input": [5]}, "input", "input must be a text: the model takes text, and no text"),
        ({"model": "query_encoder", "input": [99999]}, "input[0]", "input[0] must be a token id from 0 to"),
        ({"encoding_format": "int8"}, "encoding_format", "encoding_format must be 'float' or 'base64'"),
        ({"model": "sentence_tokenizer"}, "model", "model 'sentence_tokenizer' has no embeddings; models with"),
    ],
)
def test_what_is_wrong_is_named(server: ServerProcess, body: dict[str, Any], param: str, message: str) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        status, named, text = refusal(server, path, **body)
        assert (status, named) == (400, param)
        assert text.startswith(message)


def test_the_models_are_listed_and_an_unknown_one_is_not_found(server: ServerProcess, stock: openai.OpenAI) -> None:
    names = ["crowded", "nested", "prefixed", "query_encoder", "rill_embedder", "sentence_encoder"]
    assert [model.id for model in stock.models.list().data] == names
    assert stock.models.retrieve("sentence_encoder").model_dump()["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError) as unknown:
        stock.embeddings.create(model="nope", input="x")
    assert unknown.value.code == "model_not_found"
    assert f"model 'nope' not found; available: {', '.join(names)}" in unknown.value.message


def test_pooling_has_vllms_shape(server: ServerProcess, stock: openai.OpenAI) -> None:
    with server.client() as client:
        found = client.post("/pooling", json={"model": "sentence_encoder", "input": ["hello"], "task": "embed"}).json()
    assert found["object"] == "list" and found["id"].startswith("pool-") and found["usage"]["total_tokens"] == 3
    [each] = found["data"]
    assert (each["object"], each["index"]) == ("pooling", 0)
    [vector] = vectors(stock.embeddings.create(model="sentence_encoder", input="hello"))
    assert np.allclose(each["data"], vector, atol=1e-6)


@pytest.mark.parametrize("model", ["sentence_encoder", "query_encoder"])
def test_the_tokens_of_an_encoder(server: ServerProcess, model: str) -> None:
    expected = TOKENIZER.encode(LONG)
    with server.client() as client:
        found = client.post("/tokenize", json={"model": model, "prompt": LONG, "return_token_strs": True}).json()
        text = client.post("/detokenize", json={"model": model, "tokens": expected.ids[:3]}).json()
        chat = client.post("/tokenize", json={"model": model, "messages": [{"role": "user", "content": "x"}]})
        long = client.post("/tokenize", json={"model": model, "prompt": "x" * ((1 << 18) + 1)})
        unnamed = client.post("/tokenize", json={"prompt": "x"})
    assert found == {
        "count": len(expected.ids),
        "max_model_len": 256,
        "tokens": expected.ids,
        "token_strs": expected.tokens,
    }
    assert text == {"prompt": "[CLS] word word"}
    assert chat.json()["error"]["message"] == "an encoder has no chat template; send prompt"
    assert long.json()["error"]["message"] == "prompt must have at most 262144 characters, got 262145"
    assert unnamed.json()["max_model_len"] == 1023, "the language model's, though it embeds"


def num_encoded(server: ServerProcess) -> int:
    """Return how many texts the encoder has encoded."""
    with server.client() as client:
        [stats] = client.get("/v2/models/sentence_encoder/stats").json()["model_stats"]
    return int(stats["inference_count"])


def test_a_client_that_leaves_ends_its_work(server: ServerProcess) -> None:
    texts = ["a passage of words " * 50] * MAX_INPUTS
    before = num_encoded(server)
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.base_url, timeout=0.5) as client:
        client.post("/v1/embeddings", json={"model": "sentence_encoder", "input": texts})
    done = num_encoded(server)
    with server.client() as client:
        assert client.post("/v1/embeddings", json={"model": "sentence_encoder", "input": "x"}).status_code == 200
    assert num_encoded(server) - before < MAX_INPUTS // 2
    assert num_encoded(server) - done < 100, "what was queued is gone"


def test_a_request_that_takes_too_long_ends_in_time(server: ServerProcess) -> None:
    body = {"model": "sentence_encoder", "input": ["a passage of words " * 50] * MAX_INPUTS}
    with server.client() as client:
        answer = client.post("/v1/embeddings", json=body, headers={"x-sluice-timeout-ms": "100"})
    assert answer.status_code == 504
    assert answer.json()["error"]["message"] == "the request was not answered within 0.1 s"


def test_megabytes_hold_up_nobody(server: ServerProcess) -> None:
    """While texts of 8 MB are read and tokenized, other requests are answered."""
    body = json.dumps({"model": "sentence_encoder", "input": "word " * 1_600_000, "truncate_prompt_tokens": -1})
    answers: list[int] = []

    def send() -> None:
        with server.client() as client:
            answers.append(client.post("/v1/embeddings", content=body).status_code)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    with server.client() as client:
        while any(thread.is_alive() for thread in threads):
            assert client.get("/health").status_code == 200
            time.sleep(0.01)
    assert answers == [200, 200]
    with server.client() as client:
        assert client.post("/v1/embeddings", content=body + " " * 2_000_000).status_code == 413


def test_a_full_queue_is_said_so(server: ServerProcess) -> None:
    def send(num_texts: int) -> httpx.Response:
        with server.client() as client:
            body = {"model": "crowded", "input": ["a passage of words " * 30] * num_texts}
            return client.post("/v1/embeddings", json=body)

    with ThreadPoolExecutor(6) as pool:
        refused = [each for each in pool.map(send, [100] * 6) if each.status_code != 200]
    assert refused and {each.status_code for each in refused} <= {429, 503}
    assert "crowded" in refused[0].json()["error"]["message"]
    assert send(1).status_code == 200
