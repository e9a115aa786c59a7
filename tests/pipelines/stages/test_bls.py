"""The native BLS over native stages and a token model that answers as the test says."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.stages.backend import BlsBackend, PostprocessingBackend, PreprocessingBackend
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.serving.job import InferJob
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Tensor
from tests.pipelines.stages.parts import (
    TOKEN_MODEL,
    Answer,
    Scripted,
    at_once,
    config_of,
    generated,
    load,
    request,
    streaming,
    texts,
)
from tests.serving.backends.builders import Lookup, infer_stream
from tests.waiting import PATIENCE_S

CONFIG = 'name: "tensorrt_llm_bls" backend: "tensorrt_llm_bls" max_batch_size: 4 '
Serve = Callable[..., Awaitable[Model]]


@pytest.fixture
async def pre(rill_path: Path) -> Model:
    config = config_of('name: "preprocessing" max_batch_size: 4', tokenizer_dir=".")
    return await load(PreprocessingBackend(), rill_path, config)


@pytest.fixture
async def post(rill_path: Path) -> Model:
    config = config_of('name: "postprocessing" max_batch_size: 4', tokenizer_dir=".")
    return await load(PostprocessingBackend(), rill_path, config)


@pytest.fixture
def serve(pre: Model, post: Model) -> Serve:
    """BLS around a token model, and maybe another postprocessing."""

    async def bls(token_model: Model, *others: Model, config: str = CONFIG, **parameters: str) -> Model:
        lookup = Lookup(pre, post, token_model, *others)
        return await load(BlsBackend(), Path(), config_of(config, **parameters), lookup)

    return bls


def ids_of(rill: Tokenizer, text: str) -> list[int]:
    return rill.encode_words(text, "text")


def bls_fields(text: str = "Where to?", **fields: Any) -> dict[str, Any]:
    return {"text_input": [[text]], "max_tokens": [[9]], **fields}


async def test_a_stream_is_the_text_in_pieces(serve: Serve, rill: Tokenizer) -> None:
    # Characters of several tokens come whole.
    text = "A river 流 runs 🌊"
    model = await serve(Scripted(streaming(ids_of(rill, text))))
    pieces = await texts(model, **bls_fields(stream=[[True]]))
    assert "".join(pieces) == text
    assert len(pieces) > 3 and not any("\ufffd" in piece for piece in pieces)


async def test_accumulated_tokens(serve: Serve, rill: Tokenizer) -> None:
    ids = ids_of(rill, "A river runs")
    model = await serve(Scripted(streaming(ids)), accumulate_tokens="True")
    expected = [rill.decode(ids[:end], skip_special_tokens=True) for end in range(1, len(ids) + 1)]
    assert await texts(model, streams=True, **bls_fields()) == expected


async def test_the_request_to_the_token_model(serve: Serve, rill: Tokenizer) -> None:
    token_model = Scripted(at_once(ids_of(rill, "north")))
    model = await serve(token_model)
    fields = bls_fields("Where?", top_k=[[3]], stop_words=[["sea"]], bad_words=[["land"]], return_log_probs=[[True]])
    await texts(model, **fields)
    [found] = token_model.requests
    plain = {name: tensor.array.tolist() for name, tensor in found.inputs.items()}
    prompt = rill.encode("Where?", "text", add_special_tokens=True)
    assert plain["input_ids"] == [prompt]
    assert (plain["input_lengths"], plain["request_output_len"]) == ([len(prompt)], [9])
    assert (plain["runtime_top_k"], plain["end_id"]) == ([[3]], [[rill.eos_token_id]])
    assert (plain["return_log_probs"], plain["exclude_input_in_output"]) == ([True], [[True]])
    assert ids_of(rill, " sea")[0] in plain["stop_words_list"][0][0]
    assert ids_of(rill, " land")[0] in plain["bad_words_list"][0][0]
    assert "pad_id" not in plain and "decoder_input_ids" not in plain


@pytest.mark.parametrize("words", [["runs"], ["never", "ver ru"], ["A river runs", "x"]])
async def test_a_stop_word_that_no_token_is(serve: Serve, rill: Tokenizer, words: list[str]) -> None:
    """It is found in the text, ends it, and the token model stops."""
    text = "A river runs to the sea"
    ids = ids_of(rill, text)

    def answer_but_the_end(job: InferJob) -> None:
        for token_id in ids:
            job.respond(generated([token_id], is_final=False))

    expected = text[: min(text.find(word) + len(word) for word in words if word in text)]
    token_model = Scripted(answer_but_the_end)
    model = await serve(token_model)
    async with asyncio.timeout(PATIENCE_S):
        assert "".join(await texts(model, **bls_fields(stream=[[True]], stop_words=[words]))) == expected
    assert token_model.jobs[0].is_cancelled
    whole = await serve(Scripted(at_once(ids)))
    assert await texts(whole, **bls_fields(stop_words=[words], exclude_input_in_output=[[True]])) == [expected]


async def test_rows_side_by_side(serve: Serve, rill: Tokenizer) -> None:
    rows = [ids_of(rill, "north"), ids_of(rill, "south and on")]
    others = {"cum_log_probs": np.array([[-1.0], [-2.0]], np.float32)}
    model = await serve(Scripted(at_once(*rows, **others)))
    fields: dict[str, Any] = {"text_input": [["a"], ["b"]], "max_tokens": [[4], [4]], "stop_words": [["x"], ["and"]]}
    response = await infer_one(model, request(model, **fields, exclude_input_in_output=[[True], [False]]))
    found = {each.name: each.array.tolist() for each in response.outputs}
    assert found == {"text_output": [b"north", b"bsouth and"], "cum_log_probs": [[-1.0], [-2.0]]}


async def test_rows_one_response_each(serve: Serve, rill: Tokenizer) -> None:
    """As a token model may that is NVIDIA's: it says which row a response is of."""

    def answer(job: InferJob) -> None:
        for row, text in ((1, "south"), (0, "north")):
            index = np.array([[row]], np.int32)
            job.respond(generated(ids_of(rill, text), is_final=row == 0, batch_index=index))

    model = await serve(Scripted(answer))
    shown = [[False], [False]]
    fields: dict[str, Any] = {"text_input": [["a"], ["b"]], "max_tokens": [[4], [4]], "exclude_input_in_output": shown}
    assert await texts(model, **fields) == ["bsouth", "anorth"]


async def test_the_models_own_default_shows_the_prompt(serve: Serve, rill: Tokenizer) -> None:
    shown, hidden = Scripted(at_once(ids_of(rill, " north"))), Scripted(at_once(ids_of(rill, " north")))
    hidden.config.parameters["exclude_input_in_output"].string_value = "true"
    assert await texts(await serve(shown), **bls_fields("Go")) == ["Go north"]
    model = await serve(hidden)
    assert await texts(model, **bls_fields("Go")) == [" north"]
    given = request(model, **bls_fields("Go"))
    given.parameters["exclude_input_in_output"] = False
    [output] = (await infer_one(model, given)).outputs
    assert output.array.tolist() == [b"Go north"]


def lossy(rill: Tokenizer) -> Scripted:
    """Someone else's postprocessing, which our detokenizer cannot stand in for: it writes all in capitals."""

    def answer(job: InferJob) -> None:
        rows, lengths = job.request.inputs["TOKENS_BATCH"].array, job.request.inputs["SEQUENCE_LENGTH"].array
        found = [
            rill.decode(ids[:length].tolist(), skip_special_tokens=True).upper().encode()
            for ids, length in zip(rows[:, 0], lengths[:, 0], strict=True)
        ]
        job.respond(InferResponse([Tensor.of("OUTPUT", np.array(found, np.object_))]))

    return Scripted(
        answer,
        """name: "loud" backend: "python" max_batch_size: 4
        input { name: "TOKENS_BATCH" data_type: TYPE_INT32 dims: [-1, -1] }
        input { name: "SEQUENCE_LENGTH" data_type: TYPE_INT32 dims: -1 }
        output { name: "OUTPUT" data_type: TYPE_STRING dims: -1 }""",
    )


async def test_another_postprocessing_is_called(serve: Serve, rill: Tokenizer) -> None:
    text = "a river 流 runs"
    token_model = Scripted(streaming(ids_of(rill, text)))
    model = await serve(token_model, lossy(rill), postprocessing_model_name="loud")
    pieces = await texts(model, **bls_fields(stream=[[True]]))
    assert "".join(pieces) == text.upper()
    assert not any("\ufffd" in piece for piece in pieces)


async def test_a_disconnect_cancels_the_token_model(serve: Serve, rill: Tokenizer) -> None:
    def answer(job: InferJob) -> None:
        job.respond(generated(ids_of(rill, "A"), is_final=False))

    token_model = Scripted(answer)
    model = await serve(token_model)
    stream = infer_stream(model, request(model, **bls_fields(stream=[[True]])))
    async with asyncio.timeout(PATIENCE_S):
        await anext(stream)
        await stream.aclose()
        await model.wait_idle()
    assert token_model.jobs[0].is_cancelled


def failing(job: InferJob) -> None:
    job.fail(SluiceError(ErrorCode.OVERLOADED, "the queue is full"))


@pytest.mark.parametrize("streams", [True, False])
async def test_errors_of_the_token_model_are_passed_on(serve: Serve, streams: bool) -> None:
    model = await serve(Scripted(failing))
    with pytest.raises(SluiceError, match="the queue is full") as raised:
        await texts(model, streams=streams, **bls_fields())
    assert raised.value.code is ErrorCode.OVERLOADED


async def test_a_model_that_is_not_there(serve: Serve) -> None:
    model = await serve(Scripted(failing), tensorrt_llm_model_name="elsewhere")
    with pytest.raises(SluiceError, match="'tensorrt_llm_bls' calls 'elsewhere', which does not serve") as raised:
        await texts(model, **bls_fields())
    assert raised.value.code is ErrorCode.UNAVAILABLE


DECLARED = """
input { name: "text_input" data_type: TYPE_STRING dims: 1 } input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "num_draft_tokens" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "image_url_input" data_type: TYPE_STRING dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
"""


async def test_drafts_and_pictures_are_refused_by_name(serve: Serve, rill: Tokenizer) -> None:
    model = await serve(Scripted(at_once(ids_of(rill, "A"))), config=CONFIG + DECLARED)
    assert await texts(model, **bls_fields("", num_draft_tokens=[[0]], image_url_input=[[""]])) == ["A"]
    with pytest.raises(SluiceError, match="'num_draft_tokens' is not supported"):
        await texts(model, **bls_fields(num_draft_tokens=[[2]]))
    with pytest.raises(SluiceError, match="'image_url_input' is not supported"):
        await texts(model, **bls_fields(image_url_input=[["http://a/b.png"]]))


@pytest.mark.parametrize("parameter", ["tensorrt_llm_draft_model_name", "multimodal_encoders_name"])
async def test_what_only_nvidias_can_is_a_load_error(serve: Serve, parameter: str) -> None:
    with pytest.raises(SluiceError, match=f"parameter '{parameter}' .* is not supported"):
        await serve(Scripted(failing), **{parameter: "given"})


async def test_streams_only_where_it_may(serve: Serve, rill: Tokenizer) -> None:
    coupled = await serve(Scripted(failing), config=CONFIG + DECLARED)
    with pytest.raises(SluiceError, match="does not stream: its transaction policy is not decoupled"):
        await texts(coupled, **bls_fields(stream=[[True]]))
    model = await serve(Scripted(failing))
    with pytest.raises(SluiceError, match="only a request of one row can stream, this one has 2"):
        await texts(model, text_input=[["a"], ["b"]], max_tokens=[[1], [1]], stream=[[True], [True]])


async def test_several_answers_to_a_request_for_one(serve: Serve, rill: Tokenizer) -> None:
    model = await serve(Scripted(streaming(ids_of(rill, "A river"))), config=CONFIG + DECLARED)
    with pytest.raises(SluiceError, match=r"gave \d responses to a request that does not stream"):
        await texts(model, **bls_fields())


async def test_between_models_that_batch_and_that_do_not(serve: Serve, rill: Tokenizer) -> None:
    ids = ids_of(rill, "north")

    def answer(job: InferJob) -> None:
        assert job.request.inputs["input_ids"].array.ndim == 1
        arrays = {"output_ids": np.array([ids], np.int32), "sequence_length": np.array([len(ids)], np.int32)}
        job.respond(InferResponse([Tensor.of(name, array) for name, array in arrays.items()]))

    token_model = Scripted(answer, TOKEN_MODEL.replace("max_batch_size: 4", "max_batch_size: 0"))
    model = await serve(token_model)
    assert await texts(model, **bls_fields(exclude_input_in_output=[[True]])) == ["north"]
    unbatched = await serve(Scripted(at_once(ids)), config=CONFIG.replace("4", "0"))
    assert await texts(unbatched, text_input=["Go"], max_tokens=[3], stop_words=["or"]) == ["Gonor"]


async def test_closing_ends_what_is_under_way(serve: Serve) -> None:
    model = await serve(Scripted(lambda job: None))
    found: list[InferResponse] = []
    model.submit(request(model, **bls_fields()), found.append)
    await model.close()
    assert found[0].error is not None
    with pytest.raises(SluiceError, match="is being unloaded"):
        model.submit(InferRequest(request(model, **bls_fields()).inputs), found.append)


ANSWERS: list[tuple[Answer, str]] = [
    (lambda job: job.respond(InferResponse()), "gave 0 responses"),
    (
        lambda job: job.respond(InferResponse([Tensor.of("cum_log_probs", np.zeros((1, 1), np.float32))])),
        "no output_ids",
    ),
]


@pytest.mark.parametrize(("answer", "message"), ANSWERS)
async def test_a_token_model_that_gives_no_tokens(serve: Serve, answer: Answer, message: str) -> None:
    model = await serve(Scripted(answer))
    with pytest.raises(SluiceError, match=message):
        await texts(model, **bls_fields())
