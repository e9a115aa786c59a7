"""Models over tensors as text models."""

import json
from typing import Any

import pytest

from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.model import text_model_of
from sluice.pipelines.text.tensor_model import TensorText
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    EncodedPrompt,
    Prompt,
    SamplingOverrides,
    TextRequest,
)
from tests.pipelines.text.tensor_models import (
    DECOUPLED,
    DONE,
    TURNS,
    Told,
    chat_of,
    config,
    events_of,
    text_request,
)
from tests.serving.backends.ensemble.parts import HeldModel, config_of

# -- which models


@pytest.mark.parametrize(
    ("inputs", "outputs", "more", "found"),
    [
        ("query", "response", "", ("query", "response")),
        ("question", "answer", "", ("question", "answer")),
        ("text_input", "text_output", "", ("text_input", "text_output")),
        ("messages", "text_output finish_reason", "", ("messages", "text_output")),
        ("words", "said", 'parameters { key: "chat_input" value { string_value: "words" } }', None),
        (
            "words",
            "said",
            'parameters { key: "chat_input" value { string_value: "words" } } '
            'parameters { key: "chat_output" value { string_value: "said" } }',
            ("words", "said"),
        ),
        ("query context", "response", "", None),
        ("query", "said", "", None),
        ("text", "embeddings", "", None),
    ],
)
def test_which_models_have_one(inputs: str, outputs: str, more: str, found: tuple[str, str] | None) -> None:
    chat = text_model_of(config(inputs, outputs, more=more))
    if found is None:
        assert chat is None
    else:
        assert isinstance(chat, TensorText)
        assert (chat._signature.input.name, chat._signature.output.name) == found


def test_optional_inputs_are_left_out_and_messages_come_first() -> None:
    lines = [
        f'input {{ name: "{name}" data_type: TYPE_STRING dims: 1 optional: true }}'
        for name in ("text_input", "messages")
    ]
    model = HeldModel(
        config_of('name: "m" output { name: "text_output" data_type: TYPE_STRING dims: 1 }' + "\n".join(lines))
    )
    assert chat_of(model)._signature.takes_messages


def test_tensors_of_other_types_and_shapes_are_none() -> None:
    for declared in ("data_type: TYPE_FP32 dims: 1", "data_type: TYPE_STRING dims: [2, -1]"):
        text = (
            f'name: "m" input {{ name: "query" {declared} }} output {{ name: "answer" data_type: TYPE_STRING dims: 1 }}'
        )
        assert text_model_of(HeldModel(config_of(text))) is None


def test_a_parameter_that_names_no_such_tensor_fails_the_load() -> None:
    with pytest.raises(SluiceError, match="parameter 'chat_input' of model 'pipeline' names 'nope', which is no BYTES"):
        text_model_of(config(more='parameters { key: "chat_input" value { string_value: "nope" } }'))


async def test_what_it_says_of_itself() -> None:
    model = config()
    chat = chat_of(model)
    assert (chat.name, chat.version, chat.created, chat.max_model_len) == ("pipeline", "1", model.created, None)
    assert await chat.prepare_shared("a") == "a"


@pytest.mark.parametrize(
    ("outputs", "more", "takes"),
    [("response", "", False), ("response sources", "", True), ("response", 'platform: "ensemble"', True)],
)
async def test_only_what_may_retrieve_takes_parameters(outputs: str, more: str, takes: bool) -> None:
    model = Told(config(outputs=outputs, more=more), DONE)
    assert chat_of(model).takes_parameters is takes
    sent = text_request(parameters={"collection": "docs"})
    if takes:
        await events_of(model, sent)
        assert model.last_request.parameters["collection"] == "docs"
    else:
        with pytest.raises(SluiceError, match=r"is a language model alone, .* takes none of collection") as caught:
            await events_of(model, sent)
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "parameters")


# -- what it asks


@pytest.mark.parametrize(("batch", "shape"), [(0, (1,)), (4, (1, 1))])
async def test_the_question_and_what_came_before_it(batch: int, shape: tuple[int, ...]) -> None:
    model = Told(config(batch=batch), DONE)
    await events_of(model, text_request(Conversation(TURNS)))
    question = model.last_request.inputs["query"]
    assert (question.shape, question.array.ravel().tolist()) == (shape, [b"What is a tensor?"])
    history = json.loads(str(model.last_request.parameters["history"]))
    assert history == [{"role": turn.role, "content": turn.content} for turn in TURNS[:-1]]


@pytest.mark.parametrize("prompt", ["Hi", Conversation((ChatMessage("user", "Hi"),)), EncodedPrompt("Hi", [1, 2])])
async def test_a_question_without_history(prompt: Prompt) -> None:
    model = Told(config(), DONE)
    await events_of(model, text_request(prompt))
    assert model.last_request.inputs["query"].array.tolist() == [b"Hi"]
    assert "history" not in model.last_request.parameters


@pytest.mark.parametrize("prompt", ["Hi", Conversation(TURNS)])
async def test_an_input_called_messages_gets_the_whole_conversation(prompt: Prompt) -> None:
    model = Told(config("messages"), DONE)
    await events_of(model, text_request(prompt))
    expected = [ChatMessage("user", prompt)] if isinstance(prompt, str) else TURNS
    given = json.loads(model.last_request.inputs["messages"].array[0])
    assert given == [{"role": turn.role, "content": turn.content} for turn in expected]
    assert "history" not in model.last_request.parameters


async def test_everything_else_goes_along_as_parameters() -> None:
    sampling = SamplingOverrides(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=7,
        stop_token_ids=(4,),
        ignore_eos=False,
        grammar=Grammar(GrammarKind.REGEX, "a+"),
    )
    model = Told(config(outputs="response sources"), DONE)
    await events_of(
        model,
        text_request(
            sampling=sampling,
            stop=("END",),
            bad_words=("no",),
            cache_salt="salt",
            tenant="ada",
            priority=3,
            timeout_s=1.5,
            queue_timeout_s=0.25,
            parameters={"collection": "docs", "top_k": 9},
            protocol="openai_chat",
        ),
    )
    sent = model.last_request
    config_text = str(sent.parameters.pop("sampling_config"))
    assert json.loads(config_text) == {"top_k": 3, "stop_words": ["END"], "bad_words": ["no"], "stop_token_ids": [4]}
    assert sent.parameters == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "ignore_eos": False,
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "a+",
        "cache_salt": "salt",
        "collection": "docs",
        "top_k": 9,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    assert (sent.id, sent.tenant, sent.priority, sent.protocol) == ("r1", "ada", 3, "openai_chat")
    assert (sent.timeout_us, sent.queue_timeout_us) == (1_500_000, 250_000)


async def test_only_outputs_that_make_the_answer_are_requested() -> None:
    model = Told(config(outputs="response sources context embeddings"), DONE)
    await events_of(model)
    counts = {"num_input_tokens", "num_output_tokens", "num_cached_tokens"}
    assert set(model.last_request.requested_outputs) == {"response", "sources"} | counts


async def test_fields_that_were_not_sent_are_left_out() -> None:
    model = Told(config(more=DECOUPLED), DONE)
    await events_of(model)
    assert model.last_request.parameters == {
        "stream": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": SamplingOverrides(logprobs=0)}, "logprobs"),
        ({"sampling": SamplingOverrides(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"sampling": SamplingOverrides(logit_bias={1: 2.0})}, "logit_bias"),
        ({"sampling": SamplingOverrides(length_penalty=2.0)}, "length_penalty"),
        ({"sampling": SamplingOverrides(no_repeat_ngram_size=3)}, "no_repeat_ngram_size"),
        ({"sampling": SamplingOverrides(grammar=Grammar(GrammarKind.CHOICE, '["a"]'))}, "grammar"),
        ({"echo": True}, "echo"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": Conversation(TURNS[:-1])}, "messages"),
    ],
)
async def test_what_would_be_lost_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    model = config()
    with pytest.raises(SluiceError, match="model 'pipeline'") as caught:
        await events_of(model, TextRequest(**({"request_id": "r1", "prompt": "a"} | fields)))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, param)
    assert not model.jobs
