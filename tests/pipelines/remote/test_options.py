"""The options that config.pbtxt may have for an API, and their completion."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.remote.backend import OpenAIBackend
from sluice.pipelines.remote.options import ApiDialect, Endpoint, parse_options
from tests import paths
from tests.pipelines.remote.models import USER, Load, ask, config_of
from tests.pipelines.remote.remote_api import RemoteApi, replying, whole
from tests.serving.config.parts import read_config

URL = "http://127.0.0.1:8000/v1"
EXAMPLES = paths.DATA / "rag" / "openai"


async def test_a_configuration_of_parameters_alone(load: Load) -> None:
    model = await load()
    assert model.spec.is_decoupled
    assert model.spec.max_batch_size == 0
    assert model.spec.inputs.keys() >= {"text_input", "messages", "max_tokens", "stop_words", "stream", "cache_salt"}
    assert all(each.is_optional for each in model.spec.inputs.values())
    outputs = ["text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens"]
    assert list(model.spec.outputs) == outputs
    assert "top_k" not in model.spec.inputs
    assert "top_k" in (await load(dialect="vllm")).spec.inputs


async def test_an_encoder_of_parameters_alone(load: Load) -> None:
    model = await load(endpoint="embeddings", dimensions=3, max_queue_size=5)
    assert model.spec.max_batch_size == 64
    assert model.spec.inputs["text"].dims == (1,)
    assert model.spec.outputs["embeddings"].dims == (3,)
    assert model.config.dynamic_batching.default_queue_policy.max_queue_size == 5


async def test_declared_tensors_stay(load: Load) -> None:
    text = """
        input { name: "messages" data_type: TYPE_STRING dims: [1] }
        output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
    """
    model = await load(text)
    assert list(model.spec.inputs) == ["messages"]
    assert not model.spec.is_decoupled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('input { name: "query" data_type: TYPE_STRING dims: [1] }', "query"),
        ('input { name: "messages" data_type: TYPE_FP32 dims: [1] }', "BYTES"),
        ('input { name: "max_tokens" data_type: TYPE_INT32 dims: [1] }', "neither text_input nor messages"),
        ('output { name: "answer" data_type: TYPE_STRING dims: [1] }', "answer"),
        ("sequence_batching { direct {} }", "keeps no state"),
    ],
)
async def test_tensors_that_the_api_has_not(load: Load, text: str, message: str) -> None:
    with pytest.raises(SluiceError, match=message) as caught:
        await load(text)
    assert caught.value.code is ErrorCode.INVALID


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("endpoint", "images", "chat, completions, embeddings"),
        ("dialect", "klingon", "openai, vllm"),
        ("timeout_s", "0", "> 0"),
        ("timeout_s", "soon", "float"),
        ("max_retries", "-1", ">= 0"),
        ("max_concurrency", "0", ">= 1"),
        ("check_on_load", "maybe", "bool"),
        ("extra_body", "{", "JSON|truncated|malformed"),
        ("extra_body", '{"model": "other"}', "fills in itself"),
        ("headers", '{"x": 5}', "str"),
        ("base_url", "api.openai.com/v1", "http:// or https://"),
        ("base_url", "http://host:port/v1", "http:// or https://"),
        ("base_url", "https://host/v1?x=1", "must end with the path"),
        ("base_url", "", "missing"),
    ],
)
def test_values_that_there_are_not(key: str, value: str, message: str) -> None:
    with pytest.raises(SluiceError, match=message) as caught:
        parse_options(config_of("", {"base_url": URL} | {key: value}))
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.param == key
    assert "hosted" in caught.value.message


@pytest.mark.parametrize(
    "parameters",
    [
        {"api_key": "sk-plain"},
        {"headers": '{"Authorization": "Bearer sk-plain"}'},
        {"headers": '{"api-key": "sk-plain"}'},
        {"headers": '{"x-proxy-token": "sk-plain"}'},
        {"base_url": "https://me:sk-plain@host/v1"},
    ],
)
def test_a_key_in_plain_sight_is_refused(parameters: dict[str, str]) -> None:
    with pytest.raises(SluiceError, match="api_key_file") as caught:
        parse_options(config_of("", {"base_url": URL} | parameters))
    assert "sk-plain" not in caught.value.message


async def test_a_key_from_a_file_shows_nowhere(api: RemoteApi, load: Load, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sk-file\n")
    api.answer = replying(whole("x"))
    model = await load(api_key_file="secret")
    await ask(model, {"messages": USER})
    assert api.exchanges[0].headers["authorization"] == "Bearer sk-file"
    assert "sk-file" not in str(model.config)


async def test_without_a_key_none_is_sent(api: RemoteApi, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, "of-the-environment")
    api.answer = replying(whole("x"))
    await ask(await load(), {"messages": USER})
    headers = api.exchanges[0].headers
    assert "authorization" not in headers
    assert "of-the-environment" not in str(headers)


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), ("", "one key"), ("a\nb", "one key")])
async def test_a_key_file_without_a_key(load: Load, tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "secret").write_text(content)
    with pytest.raises(SluiceError, match=message) as caught:
        await load(api_key_file="secret")
    assert caught.value.param == "api_key_file"


async def test_headers_from_a_file_show_nowhere(api: RemoteApi, load: Load, tmp_path: Path) -> None:
    (tmp_path / "headers.json").write_text('{"x-proxy-token": "hidden"}')
    api.answer = replying(whole("x"))
    model = await load(headers='{"x-team": "search"}', headers_file="headers.json")
    await ask(model, {"messages": USER})
    assert api.exchanges[0].headers["x-proxy-token"] == "hidden"
    assert api.exchanges[0].headers["x-team"] == "search"
    assert "hidden" not in str(model.config)
    (tmp_path / "headers.json").write_text('{"x-proxy-token": 5}')
    with pytest.raises(SluiceError, match="object of strings"):
        await load(headers_file="headers.json")


async def test_certificates_that_are_none(load: Load, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("hello")
    with pytest.raises(SluiceError, match="ca_file"):
        await load(ca_file="ca.pem")
    with pytest.raises(SluiceError, match="No such file"):
        await load(ca_file="other.pem")


async def test_the_check_at_load(api: RemoteApi, load: Load) -> None:
    api.answer = replying({"object": "list", "data": [{"id": "gpt-x"}]})
    await load(model="gpt-x", check_on_load="true")
    assert api.exchanges[0].path == "/v1/models"
    with pytest.raises(SluiceError, match="gpt-x") as caught:
        await load(model="gpt-y", check_on_load="true")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(SluiceError, match="cannot be reached"):
        await load(base_url="http://127.0.0.1:9/v1", check_on_load="true", max_retries=0)


async def test_without_the_library(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_openai(name: str, *rest: Any, **named: Any) -> Any:
        if name == "openai":
            raise ImportError("No module named 'openai'")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_openai)
    with pytest.raises(SluiceError, match=r"pip install 'sluice\[openai\]'") as caught:
        await load()
    assert caught.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("name", "endpoint", "dialect"),
    [
        ("gpt", Endpoint.CHAT, ApiDialect.OPENAI),
        ("llama", Endpoint.CHAT, ApiDialect.VLLM),
        ("hosted_encoder", Endpoint.EMBEDDINGS, ApiDialect.OPENAI),
    ],
)
async def test_the_examples_load(
    name: str, endpoint: Endpoint, dialect: ApiDialect, load: Load, tmp_path: Path
) -> None:
    config, _ = read_config(EXAMPLES / name / "config.pbtxt")
    assert config.name == name
    assert config.backend == OpenAIBackend.name
    options = parse_options(config)
    assert (options.endpoint, options.dialect) == (endpoint, dialect)
    parameters = {key: each.string_value for key, each in config.parameters.items()}
    if options.api_key_file:
        (tmp_path / "key").write_text("sk-x")
        parameters["api_key_file"] = "key"
    model = await load(**parameters)
    outputs = {"embeddings"} if endpoint is Endpoint.EMBEDDINGS else {"text_output"}
    assert outputs <= model.spec.outputs.keys()
    assert model.spec.inputs.keys() & {"text", "messages"}
