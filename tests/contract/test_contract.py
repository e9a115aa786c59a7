"""Every protocol answers the same request to a language model alike, or says that it cannot."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from sluice.engine.config import EngineConfig
from sluice.engine.types import GenerateRequest
from sluice.gateway.api.v2.grpc.server import GrpcServer
from sluice.gateway.options.grpc import GrpcOptions
from sluice.pipelines.text.types import ChatMessage, Conversation
from tests.contract.protocols import (
    COLUMNS,
    NAMES,
    QUESTION,
    RUNNERS,
    Answer,
    Refusal,
    Runner,
    Served,
    grpc_request,
    name_of,
)
from tests.gateway.front.http.live import LiveServer, live_server
from tests.waiting import wait_until


@contextmanager
def serving(**settings: Any) -> Iterator[Served]:
    """Serve over HTTP and gRPC, with the settings of `live_server`."""

    async def start(live: LiveServer) -> tuple[GrpcServer, int]:
        server = GrpcServer(live.server.v2, GrpcOptions(port=0), "127.0.0.1")
        return server, await server.start()

    with live_server(**settings) as live:
        rpc, port = live.run(start(live))
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                prompt_ids = live.run(live.model.prepare(Conversation((ChatMessage("user", QUESTION),))))
                prompt = live.model.tokenizer.decode(prompt_ids, skip_special_tokens=False)
                inputs = live.get("/v2/models/rill").json().get("inputs", ())
                yield Served(live, stub, prompt, prompt_ids, {each["name"]: each["datatype"] for each in inputs})
        finally:
            live.run(rpc.stop(0))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 1.5, "seed": 7}
LIKELIEST = -math.log1p(4095 / math.e)
"""The stand-in gives its token a logit of 1 and the 4095 others 0."""
EACH = pytest.mark.parametrize("runner", RUNNERS.values(), ids=list(RUNNERS))
OVER_HTTP = pytest.mark.parametrize(
    "runner", [each for each in RUNNERS.values() if each.body], ids=[name for name in RUNNERS if RUNNERS[name].body]
)


def of_protocols_that_have(
    cases: Mapping[str, Collection[str]], is_exempt: Callable[[str, Runner], bool] = lambda name, runner: False
) -> pytest.MarkDecorator:
    """Return a mark that runs each case on each way to ask that has all the case's fields and is not exempt."""
    found = [
        pytest.param(runner, name, id=f"{runner.name}-{name}")
        for runner in RUNNERS.values()
        for name, fields in cases.items()
        if all(name_of(field, runner.column) for field in fields) and not is_exempt(name, runner)
    ]
    return pytest.mark.parametrize(("runner", "name"), found)


def supported(runner: Runner, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without those that change nothing here and that the protocol lacks."""
    return {name: value for name, value in fields.items() if name != "ignore_eos" or name_of(name, runner.column)}


def answer_of(served: Served, runner: Runner, fields: dict[str, Any]) -> Answer:
    answer = runner.ask(served, supported(runner, fields))
    assert isinstance(answer, Answer), answer
    assert not answer.warning
    return answer


def refusal_of(served: Served, runner: Runner, fields: dict[str, Any]) -> Refusal:
    refusal = runner.ask(served, supported(runner, fields))
    assert isinstance(refusal, Refusal), refusal
    return refusal


# The last field of each is the one whose effect is seen.
ANSWERS: dict[str, dict[str, Any]] = {
    "top_k of 1 is greedy": SAMPLED | {"top_k": 1},
    "min_p of 1 is greedy": SAMPLED | {"min_p": 1.0},
    "a tiny top_p is greedy": SAMPLED | {"top_p": 1e-6},
    "a seed decides what is sampled": SAMPLED,
    "another seed decides otherwise": SAMPLED | {"seed": 8},
    "typical tokens alone are drawn": SAMPLED | {"typical_p": 0.2},
    "a repetition costs": SAMPLED | {"temperature": 0.1, "max_tokens": 50, "repetition_penalty": 100},
    "what was there costs": GREEDY | {"max_tokens": 40, "presence_penalty": 2},
    "what was there often costs more": GREEDY | {"max_tokens": 40, "frequency_penalty": 2},
    "a bad word does not come": GREEDY | {"bad_words": ["{first word}"]},
    "a token may be forbidden": GREEDY | {"logit_bias": {"{first token}": -100}},
    "a token may be all that is allowed": GREEDY | {"allowed_token_ids": [70, 71]},
    "a token may end the answer": GREEDY | {"stop_token_ids": ["{third token}"]},
}
IS_GREEDY = {name for name in ANSWERS if name.endswith("is greedy")}


@pytest.fixture(scope="module")
def tokens(served: Served) -> list[int]:
    """The tokens of the greedy answer."""
    body = {"model": "rill", "prompt": served.prompt, "return_token_ids": True, **GREEDY}
    return list(served.live.post("/v1/completions", body).json()["choices"][0]["token_ids"])


def filled(served: Served, tokens: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    """Put the greedy answer's own words and tokens into the fields."""
    places = {"{first word}": served.echo(1).strip(), "{first token}": str(tokens[0]), "{third token}": tokens[2]}

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {places.get(key, key): each for key, each in value.items()}
        return [places.get(each, each) for each in value] if isinstance(value, list) else value

    return {name: fill(value) for name, value in fields.items()}


@EACH
def test_the_answer_is_the_model_s_with_its_counts(served: Served, runner: Runner) -> None:
    for _ in range(2):  # the second finds the prompt in the cache
        answer = answer_of(served, runner, GREEDY)
        assert (answer.texts, answer.finish) == ((served.echo(12),), "length")
        assert (answer.num_prompt, answer.num_tokens) == (len(served.prompt_ids), 12)


@of_protocols_that_have({name: fields.keys() - {"ignore_eos"} for name, fields in ANSWERS.items()})
def test_a_field_has_its_effect(served: Served, tokens: list[int], runner: Runner, name: str) -> None:
    fields = filled(served, tokens, ANSWERS[name])
    answer, first = answer_of(served, runner, fields), answer_of(served, RUNNERS["completions"], fields)
    assert (answer.texts, answer.finish, answer.num_tokens) == (first.texts, first.finish, first.num_tokens)
    *_, seen = fields
    without = {field: value for field, value in fields.items() if field != seen}
    plain = (served.echo(12),) if name in IS_GREEDY else answer_of(served, RUNNERS["completions"], without).texts
    assert (answer.texts == plain) == (name in IS_GREEDY)


NAMES_ITS_STOP = ("chat", "completions", "messages")


@EACH
def test_a_stop_string_ends_the_text_before_it(served: Served, runner: Runner) -> None:
    text = served.echo(12)
    stop = text[11:14]
    answer = answer_of(served, runner, GREEDY | {"stop": ["never there", stop]})
    assert (answer.texts, answer.finish) == ((text[: text.index(stop)],), "stop")
    assert answer.stop == (stop if runner.column in NAMES_ITS_STOP else None)


@of_protocols_that_have({"logprobs": ["logprobs"]})
def test_log_probabilities_are_one_for_each_token(served: Served, runner: Runner, name: str) -> None:
    answer = answer_of(served, runner, GREEDY | {"logprobs": True})
    assert answer.logprobs == pytest.approx([LIKELIEST] * 12, rel=1e-5)
    assert answer_of(served, runner, GREEDY).logprobs is None


@of_protocols_that_have({"n": ["n"]}, lambda name, runner: runner.column == "v2" and not runner.is_streamed)
def test_several_answers_have_seeds_one_after_the_other(served: Served, runner: Runner, name: str) -> None:
    alone = [answer_of(served, runner, SAMPLED | {"seed": seed}).texts[0] for seed in (7, 8)]
    assert list(answer_of(served, runner, SAMPLED | {"n": 2}).texts) == alone


@pytest.fixture
def submitted(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """Requests that reach the engine."""
    requests: list[GenerateRequest] = []
    submit = served.live.engine.submit

    def record(request: GenerateRequest) -> Any:
        requests.append(request)
        return submit(request)

    monkeypatch.setattr(served.live.engine, "submit", record)
    return requests


@EACH
def test_priority_and_salt_reach_the_engine(served: Served, submitted: list[GenerateRequest], runner: Runner) -> None:
    for field, value in (("priority", 7), ("cache_salt", "salt")):
        if name_of(field, runner.column) is not None:
            answer_of(served, runner, GREEDY | {field: value})
            assert getattr(submitted[-1], field) == value


# With the protocols that take it: Ollama takes the nearest value, and to v2 a top_p of 0 is none.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a temperature over 2": ({"temperature": 3}, "ollama"),
    "a top_p of nothing": ({"top_p": 0}, "ollama v2"),
    "a top_k below none": ({"top_k": -2}, ""),
    "a min_p over 1": ({"min_p": 1.5}, "ollama"),
    "a typical_p of nothing": ({"typical_p": 0}, ""),
    "a repetition_penalty of nothing": ({"repetition_penalty": 0}, ""),
    "a presence_penalty over 2": ({"presence_penalty": 3}, ""),
    "a frequency_penalty under -2": ({"frequency_penalty": -3}, ""),
    "no token at all": ({"max_tokens": 0}, "ollama"),
    "more tokens than the context": ({"max_tokens": 5000}, "ollama messages"),
    "fewer tokens than are asked for": ({"max_tokens": 2, "min_tokens": 3}, ""),
    "too many stop strings": ({"stop": ["x"] * 65}, ""),
    "a bad word of spaces": ({"bad_words": [" "]}, ""),
    "a bias over 100": ({"logit_bias": {"5": 101}}, ""),
    "a bias of a token that is none": ({"logit_bias": {"4096": 1}}, ""),
    "no allowed token": ({"allowed_token_ids": []}, ""),
    "a token that ends and is none": ({"stop_token_ids": [-1]}, ""),
    "more than 128 answers": ({"n": 129}, "v2"),
    "no answer": ({"n": 0}, ""),
    "a salt of 257 characters": ({"cache_salt": "x" * 257}, ""),
    "a priority over 32 bits": ({"priority": 2**31}, ""),
}
LAST = {"fewer tokens than are asked for": "min_tokens"}
"""The field that is named, where it is not the only one."""
NAMED = {name: [LAST.get(name, next(iter(fields)))] for name, (fields, _) in REFUSED.items()}


@of_protocols_that_have(NAMED, lambda name, runner: runner.column in REFUSED[name][1].split())
def test_a_value_out_of_range_is_refused_by_the_client_s_name(served: Served, runner: Runner, name: str) -> None:
    fields, _ = REFUSED[name]
    [field] = NAMED[name]
    wire = name_of(field, runner.column)
    assert wire is not None
    refusal = refusal_of(served, runner, fields)
    assert refusal.names(wire.split(".")[-1]) or refusal.names(field), refusal
    assert refusal.status in (400, 500, "INVALID_ARGUMENT", "stream") and not refusal.can_retry


WRONG: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p"), "hot"),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "high"),
    **dict.fromkeys(("top_k", "seed", "max_tokens", "min_tokens", "n", "priority"), True),
    **dict.fromkeys(("stop", "bad_words", "logit_bias", "allowed_token_ids", "stop_token_ids"), 5),
    **{name: [5] for name in ("cache_salt", "ignore_eos", "logprobs", "prompt_cache_key")},
    **dict.fromkeys(("prompt_logprobs", "thinking_token_budget"), "many"),
}


@of_protocols_that_have({field: [field] for field in NAMES}, lambda name, runner: not runner.body)
def test_a_value_of_a_wrong_type_is_refused(served: Served, runner: Runner, name: str) -> None:
    wire = name_of(name, runner.column)
    assert wire is not None
    refusal = refusal_of(served, runner, {name: WRONG[name]})
    assert refusal.status in (400, 500)
    assert runner.column == "v2" or refusal.names(wire.split("[")[0]), refusal


EFFECTIVE: dict[str, Any] = {
    "stop_token_ids": [5],
    "bad_words": ["x"],
    "min_tokens": 2,
    "ignore_eos": True,
    "logit_bias": {"5": 1},
    "allowed_token_ids": [5],
    "logprobs": 1,
    "prompt_logprobs": 1,
    "n": 2,
    "priority": 1,
    "cache_salt": "salt",
    "thinking_token_budget": 3,
    "prompt_cache_key": "key",
}
LACKING = [
    pytest.param(runner, field, id=f"{name}-{field}")
    for name, runner in RUNNERS.items()
    for field in EFFECTIVE
    if name_of(field, runner.column) is None
    and not (runner.column == "v2" and (field == "prompt_cache_key" or isinstance(EFFECTIVE[field], list | dict)))
]
"""v2's unknown parameters are a model's own, of plain values; a key for a version is a header there."""


@pytest.mark.parametrize(("runner", "field"), LACKING)
def test_what_a_protocol_lacks_is_refused_or_told(served: Served, runner: Runner, field: str) -> None:
    answer = runner.ask(served, {"max_tokens": 2, field: EFFECTIVE[field]})
    if isinstance(answer, Refusal):
        assert answer.names(field), answer
    else:
        assert field in answer.warning, answer


def test_every_field_has_a_place_in_every_protocol() -> None:
    assert all(len(row) == len(COLUMNS) for row in NAMES.values())
    assert {name for name, row in NAMES.items() if None in row} == EFFECTIVE.keys()
    assert WRONG.keys() == NAMES.keys()


@EACH
@pytest.mark.parametrize("field", ["thinking_token_budget"])
def test_a_model_without_reasoning_has_nothing_that_a_budget_could_end(
    served: Served, runner: Runner, field: str
) -> None:
    answer = runner.ask(served, {"max_tokens": 2, field: 3})
    assert answer.names(field) if isinstance(answer, Refusal) else field in answer.warning
    answer_of(served, runner, GREEDY | {field: -1})


STATUS = {"ModelInfer": "NOT_FOUND", "ModelStreamInfer": "stream"}


@EACH
def test_a_model_that_is_not_there_is_named(served: Served, runner: Runner) -> None:
    refusal = refusal_of(served, runner, {"model": "nobody"})
    assert refusal.status == STATUS.get(runner.name, 404) and refusal.names("nobody")


@EACH
@pytest.mark.parametrize("num_steps", [0, 3], ids=["before the first token", "in the middle"])
def test_a_failure_is_told_without_our_inside(served: Served, runner: Runner, num_steps: int) -> None:
    served.live.wait_idle()
    served.live.runner.hold_after(num_steps)
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(refusal_of, served, runner, GREEDY)
            served.live.runner.wait_held()
            served.live.runner.error = RuntimeError("secret of the house")
            served.live.runner.release()
            refusal = asked.result()
    finally:
        served.live.runner.error = None
        served.live.runner.release()
    has_begun = runner.body is not None and runner.is_streamed and num_steps > 0
    of_grpc = {"ModelInfer": "INTERNAL", "ModelStreamInfer": "stream"}
    assert refusal.status == of_grpc.get(runner.name, 200 if has_begun else 500)
    assert "secret" not in refusal.message


@pytest.fixture
def held(served: Served) -> Iterator[Served]:
    """A server whose engine stands still after three steps."""
    served.live.wait_idle()
    served.live.runner.hold_after(3)
    yield served
    served.live.runner.release()
    served.live.wait_idle()


@OVER_HTTP
def test_a_client_that_leaves_frees_its_blocks(held: Served, runner: Runner) -> None:
    assert runner.body is not None
    path, body = runner.body(held, supported(runner, GREEDY | {"max_tokens": 400}))
    connection = held.live.send(path, body)
    try:
        if runner.is_streamed:
            assert connection.recv(1024)
        else:
            held.live.runner.wait_held()
    finally:
        connection.close()
    held.live.wait_idle()
    held.live.runner.release()
    assert held.live.blocks_used_after_step() == 0


@pytest.mark.parametrize("name", ["ModelInfer", "ModelStreamInfer"])
def test_a_call_that_is_cancelled_frees_its_blocks(held: Served, name: str) -> None:
    request = grpc_request(held, GREEDY | {"max_tokens": 400})
    call: Any = held.stub.ModelInfer.future(request) if name == "ModelInfer" else None
    if call is None:
        request.parameters["stream"].bool_param = True
        call = held.stub.ModelStreamInfer(iter([request]))
        next(call)
    held.live.runner.wait_held()
    call.cancel()
    held.live.wait_idle()
    held.live.runner.release()
    assert held.live.blocks_used_after_step() == 0


@pytest.fixture(scope="module")
def full() -> Iterator[Served]:
    """A server that answers one request, with another in its queue, and has room for none."""
    limits = EngineConfig(model_path="none", max_num_seqs=1, max_queued_requests=1)
    with serving(engine_config=limits) as busy:
        busy.live.runner.hold_after(1)
        path, body = "/v1/completions", {"model": "rill", "prompt": "x", "max_tokens": 900, "ignore_eos": True}
        with busy.live.send(path, body):
            busy.live.runner.wait_held()
            with busy.live.send(path, body):
                wait_until(lambda: busy.live.server.plane.num_open == 2)
                yield busy
        busy.live.runner.release()


@pytest.fixture(scope="module")
def loading() -> Iterator[Served]:
    """A server that listens while its model is loading."""
    with serving(is_loaded=False) as running:
        yield running


@pytest.mark.parametrize("name", RUNNERS)
def test_one_too_many_is_told_to_come_back(full: Served, name: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refusal_of, full, RUNNERS[name], {})
        while not asked.done():  # the engine reads what is new between its steps
            full.live.runner.hold_after(1)
            full.live.runner.wait_held()
        refusal = asked.result()
    expected = {"ModelInfer": "RESOURCE_EXHAUSTED", "ModelStreamInfer": "stream"}.get(name, 429)
    assert refusal.status == expected, refusal
    assert refusal.can_retry or not RUNNERS[name].body


@pytest.mark.parametrize("name", RUNNERS)
def test_a_model_that_is_loading_says_so(loading: Served, name: str) -> None:
    refusal = refusal_of(loading, RUNNERS[name], {})
    expected = {"ModelInfer": "UNAVAILABLE", "ModelStreamInfer": "stream"}.get(name, 503)
    assert refusal.status == expected and "not ready" in refusal.message, refusal
    assert refusal.can_retry or not RUNNERS[name].body
