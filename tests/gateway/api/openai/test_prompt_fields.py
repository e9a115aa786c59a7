"""Fields that decide which tokens the model gets, and which it may answer with; transformers makes the same ones."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.gateway.front.http.live import LiveServer
from tests.paths import RILL_TOKENIZER

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
TEXT: dict[str, Any] = {"model": "rill", "prompt": "What is a block table?", "max_tokens": 6, "temperature": 0}
QUESTION: Any = {"role": "user", "content": "What is a block table?"}
BEGUN: Any = [QUESTION, {"role": "assistant", "content": "A block table is"}]
CHAT: dict[str, Any] = {"model": "rill", "messages": [QUESTION], "max_tokens": 1, "temperature": 0}
REFERENCE = AutoTokenizer.from_pretrained(RILL_TOKENIZER)
TEMPLATE = (
    "{{ bos_token }}{{ greeting }}{% for document in documents or [] %}[{{ document.title }}]{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


def prompt_ids(live: LiveServer, **fields: Any) -> list[int]:
    """Return the prompt's token ids, as the server tells them and as it counts them."""
    answer = live.post(CHAT_PATH, CHAT | {"return_token_ids": True} | fields).json()
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    return list(answer["prompt_token_ids"])


def rendered(messages: Any, **options: Any) -> list[int]:
    return list(REFERENCE.apply_chat_template(messages, return_dict=False, **options))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}),
    ],
)
def test_where_the_prompt_ends(live: LiveServer, fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert prompt_ids(live, messages=BEGUN, **fields) == rendered(BEGUN, **options)
    found = live.post("/tokenize", {"messages": BEGUN} | fields).json()["tokens"]
    assert found == rendered(BEGUN, **options)


def test_the_answer_goes_on_with_the_last_message(live: LiveServer, client: openai.OpenAI) -> None:
    settings: Any = {"model": "rill", "messages": BEGUN, "max_tokens": 8, "temperature": 0}
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    whole = client.chat.completions.create(**settings, extra_body=extra)
    assert whole.choices[0].message.content == live.echo(rendered(BEGUN, continue_final_message=True), 8)
    chunks = client.chat.completions.create(**settings, extra_body=extra, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content


def test_a_begun_answer_that_spells_a_control_token_stays_text(live: LiveServer) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "The token <|end|> ends"}]
    end = REFERENCE.convert_tokens_to_ids("<|end|>")
    ids = prompt_ids(live, messages=messages, continue_final_message=True)
    assert ids.count(end) == rendered([QUESTION]).count(end)
    assert REFERENCE.decode(ids).endswith("The token <|end|> ends")


@pytest.mark.parametrize("number", [1, 5, 10_000])
def test_the_last_tokens_of_a_prompt_are_kept(live: LiveServer, number: int) -> None:
    ids = rendered([QUESTION], add_generation_prompt=True)
    assert prompt_ids(live, truncate_prompt_tokens=number) == ids[-number:]
    for prompt in (TEXT["prompt"], ids):
        body = TEXT | {"prompt": prompt, "truncate_prompt_tokens": number, "return_token_ids": True}
        whole = REFERENCE.encode(prompt) if isinstance(prompt, str) else prompt
        assert live.post(TEXT_PATH, body).json()["choices"][0]["prompt_token_ids"] == whole[-number:]


def test_a_prompt_is_cut_to_what_fits(live: LiveServer) -> None:
    prompt = "word and " * 20_000
    body = TEXT | {"prompt": prompt, "max_tokens": 24, "truncate_prompt_tokens": -1, "echo": True, "logprobs": 0}
    choice = live.post(TEXT_PATH, body | {"return_token_ids": True}).json()["choices"][0]
    assert choice["prompt_token_ids"] == REFERENCE.encode(prompt)[-1000:]
    assert choice["text"].startswith(REFERENCE.decode(choice["prompt_token_ids"]))
    assert len(choice["logprobs"]["tokens"]) == 1024
    refused = live.post(TEXT_PATH, body | {"prompt": "word and " * 200_000}).json()["error"]
    assert "1800000 characters" in refused["message"]


def test_a_template_of_the_request(strict_live: LiveServer) -> None:
    fields = {
        "chat_template": TEMPLATE,
        "chat_template_kwargs": {"greeting": "Hello <|end|>!"},
        "documents": [{"title": "a", "text": "b"}],
    }
    ids = prompt_ids(strict_live, **fields)
    expected = "<|bos|>Hello <|end|>![a]What is a block table?<|assistant|>"
    assert REFERENCE.decode(ids) == expected
    end = REFERENCE.convert_tokens_to_ids("<|end|>")
    assert end not in ids, "the argument has no control tokens, although the template may"
    plain = {"messages": [QUESTION], "chat_template": TEMPLATE, "chat_template_kwargs": {"greeting": "Hi"}}
    found = strict_live.post("/tokenize", plain).json()["tokens"]
    assert found == rendered([QUESTION], chat_template=TEMPLATE, greeting="Hi", add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if", "cannot be rendered: unexpected"),
        ("{{ raise_exception('no turn') }}", "no turn"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' * 10000000000 }}", "256 MiB of memory"),
        ("{{ 'a' * 20000000 }}", "it writes 20000000 characters"),
        (r"{{ '\ud800' }}", "it writes half a surrogate pair"),
        (r"{{ raise_exception('no \udfff turn') }}", "no \ufffd turn"),
    ],
)
def test_a_template_that_fails_says_why(strict_live: LiveServer, template: str, reason: str) -> None:
    answer = strict_live.post(CHAT_PATH, CHAT | {"chat_template": template})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template" and reason in answer.json()["error"]["message"]


def test_an_endless_template_is_ended_and_others_do_not_wait(strict_live: LiveServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        endless = [pool.submit(strict_live.post, CHAT_PATH, CHAT | {"chat_template": ENDLESS}) for _ in range(2)]
        others = [strict_live.post(CHAT_PATH, CHAT | each).status_code for each in ({}, {"chat_template": TEMPLATE})]
        was_running = not all(each.done() for each in endless)
        answers = [each.result() for each in endless]
    assert others == [200, 200] and was_running
    assert {answer.status_code for answer in answers} == {400}
    assert all("1 s of processor time" in answer.json()["error"]["message"] for answer in answers)


def test_arguments_that_a_template_does_not_use_are_named(live: LiveServer) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False, "messages_": 1}}
    warning = live.post(CHAT_PATH, CHAT | fields).headers["x-sluice-warning"]
    names = "chat_template_kwargs.enable_thinking, chat_template_kwargs.messages_"
    assert warning == f"fields without effect here: {names}"
