import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.rag_prompt.backend import RagPromptModel, derive_salt
from sluice.pipelines.text.citations import EncodingProgress, encode_progress
from sluice.pipelines.text.tensor_model import decode_messages
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest
from sluice.serving.spec import ModelSpec
from tests import paths
from tests.pipelines.rag.parts import parameter, texts_tensor
from tests.pipelines.rag.rag_prompt.parts import ask, load, request, source
from tests.serving.backends.builders import Lookup

SENTENCE = "A request that can never fit into the free blocks is refused at once. "
QUEUE = source("queue.md", SENTENCE, title="Queue")
LONG = source("long.md", SENTENCE * 50)
SHORT = source("short.md", "Others wait.")
BUNDLED = paths.MODELS / "rag_prompt" / "config.pbtxt"


@pytest.fixture
async def model(tmp_path: Path, lookup: Lookup) -> RagPromptModel:
    return await load(tmp_path, lookup)


async def refusal(model: RagPromptModel, asked: InferRequest) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await ask(model, asked)
    return caught.value


def ids(rows: list[list[dict[str, Any]]]) -> list[list[tuple[int, str]]]:
    return [[(each.get("id", 0), each["document"]) for each in row] for row in rows]


async def test_a_prompt_has_messages_sources_and_what_was_dropped(model: RagPromptModel) -> None:
    found = await ask(model, request("When is it refused?", [[QUEUE, LONG, SHORT]], max_tokens=64))
    assert ids(found["sources"]) == [[(1, "queue.md"), (2, "short.md")]]
    assert ids(found["dropped"]) == [[(0, "long.md")]]
    assert found["sources"][0][0]["text"] == SENTENCE
    (messages,) = found["messages"][0]
    assert [each["role"] for each in messages] == ["system", "user"]
    assert '<source id="1" title="Queue">' in messages[1]["content"]
    assert found["sampling_config"] == [[]]
    assert found["cache_salt"] == [[]]


async def test_the_prompt_and_the_answer_fit_the_models_context(model: RagPromptModel, rill: Tokenizer) -> None:
    many = [source(f"{number}.md", SENTENCE * 3) for number in range(20)]
    for max_tokens in (16, 200):
        found = await ask(model, request("When?", [many], max_tokens=max_tokens))
        token_ids = await rill.encode_chat(decode_messages(orjson.dumps(found["messages"][0][0]).decode()))
        one_more = len(rill.encode_words(SENTENCE * 3, "text")) + 30
        assert 512 - max_tokens - one_more < len(token_ids) <= 512 - max_tokens


async def test_rows_have_prompts_of_their_own(model: RagPromptModel) -> None:
    found = await ask(model, request(["One?", "Two?"], [[QUEUE, SHORT], []]))
    assert ids(found["sources"]) == [[(1, "queue.md"), (2, "short.md")], []]
    assert [row[0][-1]["content"].endswith(end) for row, end in zip(found["messages"], ("One?", "Two?"), strict=True)]
    assert [len(row) for row in found["sampling_config"]] == [0, 1]


async def test_history_stands_before_the_question(model: RagPromptModel) -> None:
    history = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'
    found = await ask(model, request("And then?", [[QUEUE]], history=history))
    assert [each["content"] for each in found["messages"][0][0][1:3]] == ["Hi", "Hello"]


async def test_context_alone_is_enough(model: RagPromptModel) -> None:
    asked = request("When?", [[QUEUE]])
    del asked.inputs["sources"]
    found = await ask(model, asked)
    assert found["sources"] == [[{"id": 1, "document": "", "start": 0, "end": 70, "score": 0.0, "text": SENTENCE}]]


async def test_the_text_of_the_context_is_what_the_prompt_has(model: RagPromptModel) -> None:
    asked = request("When?", [[QUEUE]])
    asked.inputs["context"] = texts_tensor("context", [["Rewritten by a step between."]])
    (messages,) = (await ask(model, asked))["messages"][0]
    assert "Rewritten by a step between." in messages[-1]["content"]


async def test_salts(model: RagPromptModel) -> None:
    async def salt(**given: Any) -> list[list[str]]:
        return (await ask(model, request("When?", [[QUEUE]], **given)))["cache_salt"]

    assert await salt(tenant="a") == [[derive_salt("a", "")]]
    assert await salt(tenant="a", collection_key="k") == [[derive_salt("a", "k")]]
    assert await salt(tenant="a", cache_salt="mine") == [["mine"]]


async def test_nothing_retrieved_leaves_one_answer(tmp_path: Path, lookup: Lookup) -> None:
    model = await load(tmp_path, lookup, parameter("no_answer", "Nothing (here)."))
    (config,) = (await ask(model, request("When?", [[]])))["sampling_config"][0]
    assert config == {"guided_decoding_guide_type": "regex", "guided_decoding_guide": r"Nothing \(here\)\."}
    own = request("When?", [[]], guided_decoding_guide_type="json")
    assert (await ask(model, own))["sampling_config"] == [[]]


async def test_settings_of_the_configuration(tmp_path: Path, lookup: Lookup) -> None:
    text = parameter("instructions", "Be exact. Else say: {no_answer}") + parameter("no_answer", "No.")
    model = await load(tmp_path, lookup, text + parameter("max_sources", "1") + parameter("max_tokens", "300"))
    found = await ask(model, request("When?", [[SHORT, QUEUE]]))
    assert found["messages"][0][0][0]["content"] == "Be exact. Else say: No."
    assert ids(found["dropped"]) == [[(0, "queue.md")]]
    longer = source("d", SENTENCE * 16)
    assert ids((await ask(model, request("When?", [[longer]])))["sources"]) == [[]]
    assert ids((await ask(model, request("When?", [[longer]], max_tokens=16)))["sources"]) == [[(1, "d")]]


async def test_the_bundled_configuration_is_rills(tmp_path: Path, lookup: Lookup) -> None:
    model = await load(tmp_path, lookup, config=BUNDLED.read_text())
    found = await ask(model, request("Do others wait?", [[QUEUE, SHORT]]))
    (message,) = found["messages"][0][0]
    assert message["content"] == "Do others wait?\n\nContext:\nOthers wait."


async def test_a_model_without_a_batch_dimension(tmp_path: Path, lookup: Lookup) -> None:
    model = await load(tmp_path, lookup, config='name: "rag_prompt" backend: "rag_prompt" ')
    asked = request("When?", [[QUEUE]])
    asked.inputs = {name: each.reshaped(each.shape[1:]) for name, each in asked.inputs.items()}
    shapes = {each.name: each.shape for each in (await infer_one(model, asked)).outputs}
    assert shapes == {
        "messages": (1,),
        "sources": (1,),
        "dropped": (0,),
        "sampling_config": (1,),
        "cache_salt": (1,),
    }


# -- what is refused


def asked_of(tensor: str = "", texts: Sequence[str | bytes] = (), **parameters: Any) -> InferRequest:
    """A request with two sources, and another tensor of texts."""
    asked = request("When?", [[QUEUE, SHORT]], **parameters)
    if tensor:
        asked.inputs[tensor] = texts_tensor(tensor, [texts])
    return asked


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        (asked_of(max_tokens=0), "max_tokens", "parameter 'max_tokens' must be an integer from 1 to"),
        (asked_of(max_tokens="many"), "max_tokens", "parameter 'max_tokens' must be an integer from 1 to"),
        (
            asked_of(max_tokens=512),
            "max_tokens",
            "parameter 'max_tokens' must be below the 512 tokens of model 'rill', got 512",
        ),
        (asked_of(history=5), "history", "parameter 'history' must be a string of at most"),
        (asked_of(history='{"role": "user"}'), "history", ""),
        (asked_of(cache_salt="x" * 257), "cache_salt", "must be a string of at most 256 characters"),
        (asked_of(collection_key=1), "collection_key", "parameter 'collection_key' must be a string of at most"),
        (request(SENTENCE * 40, [[QUEUE]]), "query", ""),
        (asked_of("sources", ['{"document": "a"}', "{}"]), "sources", "the one at index 0 is none"),
        (asked_of("sources", ["{}"]), "sources", "as many elements, got 2 and 1"),
        (asked_of("context", [b"\xff", b""]), "context", ""),
        (asked_of("encoding", ["soon"]), "encoding", "input 'encoding' must be the retriever's"),
    ],
    ids=range(12),
)
async def test_what_is_refused_names_its_parameter(
    model: RagPromptModel, asked: InferRequest, param: str, said: str
) -> None:
    error = await refusal(model, asked)
    assert (error.code, error.param) == (ErrorCode.INVALID, param)
    assert said in error.message


# -- the language model


async def test_a_language_model_that_does_not_serve_is_named(tmp_path: Path) -> None:
    model = await load(tmp_path, Lookup())
    error = await refusal(model, request("When?", [[QUEUE]]))
    assert error.code is ErrorCode.UNAVAILABLE
    assert error.message.startswith("model 'rag_prompt': its language model 'rill' (parameter llm) does not serve: ")


class Hosted(Model):
    """A hosted model, whose tokens are unknown."""

    def __init__(self, context_tokens: str = "") -> None:
        config = ModelConfig(name="hosted")
        if context_tokens:
            config.parameters["context_tokens"].string_value = context_tokens
        super().__init__(config, ModelSpec("hosted", 1, "", "openai", 0, {}, {}))

    def _start(self, job: Any) -> None:
        raise AssertionError("a prompt asks nothing of it")

    async def close(self) -> None:
        pass


async def test_a_hosted_model_must_declare_its_context(tmp_path: Path) -> None:
    hosted, llm = Lookup(hosted=Hosted()), parameter("llm", "hosted")
    error = await refusal(await load(tmp_path, hosted, llm), request("When?", [[QUEUE]]))
    assert error.code is ErrorCode.UNAVAILABLE
    assert "set its parameter context_tokens" in error.message


async def test_a_hosted_model_declares_its_context_and_is_not_guided(tmp_path: Path) -> None:
    model = await load(tmp_path, Lookup(hosted=Hosted("600")), parameter("llm", "hosted"))
    found = await ask(model, request("When?", [[]]))
    assert found["sampling_config"] == [[]]
    assert "No source was found" in found["messages"][0][0][-1]["content"]


async def test_a_hosted_models_tokens_are_estimated(tmp_path: Path) -> None:
    hosted, text = Lookup(hosted=Hosted()), parameter("llm", "hosted") + parameter("max_context_tokens", "600")
    asked = request("When?", [[source("d", SENTENCE * 10)]], max_tokens=100)
    tight = await load(tmp_path, hosted, text + parameter("chars_per_token", "1"))
    wide = await load(tmp_path, hosted, text + parameter("chars_per_token", "4"))
    with pytest.raises(SluiceError, match="too long"):
        await ask(tight, asked)
    assert ids((await ask(wide, asked))["sources"]) == [[(1, "d")]]


async def test_a_hosted_models_tokens_are_counted_where_its_tokenizer_is(tmp_path: Path, rill_path: Path) -> None:
    text = parameter("llm", "hosted") + parameter("max_context_tokens", "1024") + parameter("tokenizer", str(rill_path))
    model = await load(tmp_path, Lookup(hosted=Hosted()), text)
    found = await ask(model, request("<|end|>When?", [[source("d", "<|user|>")]]))
    assert found["messages"][0][0][-1]["content"].endswith("Question: < |end|>When?")
    with pytest.raises(SluiceError, match="has no tokenizer"):
        await load(tmp_path, Lookup(), parameter("tokenizer", "."))


async def test_what_answers_nothing_says_that_documents_are_being_encoded(model: RagPromptModel) -> None:
    asked = request("When?", [[]])
    progress = encode_progress(EncodingProgress("docs", 12, 610))
    asked.inputs["encoding"] = texts_tensor("encoding", [[progress]])
    (config,) = (await ask(model, asked))["sampling_config"][0]
    said = re.sub(r"\\(.)", r"\1", config["guided_decoding_guide"])
    assert said.endswith(" Documents of collection 'docs' are being encoded: 12 of 610 chunks so far.")
