"""LoRA adapters as models of OpenAI's API: `base:adapter`."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from sluice.engine.config import EngineConfig
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.http import RequestOptions
from tests.engine.capable import CapableEngine
from tests.gateway.front.http.live import LiveServer, live_server

FOLDER = "/adapters/polite"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def capable() -> Iterator[LiveServer]:
    engine = EngineConfig(model_path="none", lora_modules={"polite": FOLDER})
    with live_server(engine_config=engine, engine_class=CapableEngine) as running:
        yield running


def asked_adapter(live: LiveServer) -> str:
    assert isinstance(live.engine, CapableEngine)
    return live.engine.asked.adapter


def ask(live: LiveServer, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    return live.post(path, {"model": "rill", "max_tokens": 2, **prompt, **fields})


def test_they_are_listed_with_their_model(capable: LiveServer) -> None:
    base, french, polite = capable.get("/v1/models").json()["data"]
    assert (base["id"], french["id"], polite["id"]) == ("rill", "rill:french", "rill:polite")
    assert "parent" not in base
    assert french["parent"] == polite["parent"] == "rill"
    assert (french["root"], polite["root"]) == ("french", FOLDER)
    assert french["max_model_len"] == base["max_model_len"]
    assert capable.get("/v1/models/rill:polite").json() == polite


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_s_name_says_the_adapter(capable: LiveServer, path: str, stream: bool) -> None:
    answer = ask(capable, path, model="rill:french", stream=stream)
    assert answer.status_code == 200
    assert '"model":"rill:french"' in answer.text
    assert asked_adapter(capable) == "french"


@pytest.mark.parametrize("model", ["rill", "rill:polite"])
def test_trtllm_serves_field_says_it_too(capable: LiveServer, model: str) -> None:
    request = {"lora_name": "polite", "lora_int_id": 7, "lora_path": "/elsewhere"}
    answer = ask(capable, model=model, lora_request=request)
    assert answer.json()["model"] == "rill:polite"
    assert "x-sluice-warning" not in answer.headers
    assert asked_adapter(capable) == "polite"


@pytest.mark.parametrize(
    "fields", [{"model": "rill:rude"}, {"lora_request": {"lora_name": "rude"}}], ids=["model", "lora_request"]
)
def test_an_unknown_one_is_not_found(capable: LiveServer, fields: dict[str, Any]) -> None:
    answer = ask(capable, **fields)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "model 'rill' has no LoRA adapter 'rude'; available: french, polite"


def test_they_count_as_their_model(capable: LiveServer) -> None:
    assert ask(capable, model="rill:polite").status_code == 200
    capable.wait_idle()
    page = generate_latest(capable.server.metrics.registry).decode()
    assert 'sluice_requests_total{model="rill",outcome="ok",protocol="openai_completions"}' in page
    assert "rill:" not in page


@pytest.fixture(scope="module")
def changing() -> Iterator[LiveServer]:
    options = ServeConfig(requests=RequestOptions(allows_lora_updates=True))
    with live_server(config=options, engine_config=EngineConfig(model_path="none", enable_lora=True)) as running:
        yield running


def change(live: LiveServer, action: str, name: str, path: str = "", **fields: Any) -> httpx.Response:
    return live.post(
        f"/v1/{action}_lora_adapter", {"lora_name": name, **({"lora_path": path} if path else {}), **fields}
    )


def listed(live: LiveServer) -> dict[str, Any]:
    return {model["id"]: model.get("root") for model in live.get("/v1/models").json()["data"]}


def test_they_come_and_go_at_run_time(changing: LiveServer) -> None:
    assert listed(changing) == {"rill": None}
    answer = change(changing, "load", "sql", "/adapters/sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'rill:sql' added successfully.")
    assert listed(changing) == {"rill": None, "rill:sql": "/adapters/sql"}
    for name in ("rill:sql", "sql"):
        assert ask(changing, model=name).json()["model"] == "rill:sql"
    taken = change(changing, "load", "rill:sql", "/adapters/other")
    assert taken.status_code == 400
    assert "has already been loaded" in taken.json()["error"]["message"]
    assert change(changing, "load", "rill:sql", "/adapters/other", load_inplace=True).status_code == 200
    assert listed(changing)["rill:sql"] == "/adapters/other"
    answer = change(changing, "unload", "rill:sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'rill:sql' removed successfully.")
    assert listed(changing) == {"rill": None}
    assert ask(changing, model="rill:sql").status_code == 404
    assert change(changing, "unload", "sql").status_code == 404


def repository(live: LiveServer, action: str, name: str, **parameters: Any) -> httpx.Response:
    return live.post(f"/v2/repository/models/{name}/{action}", {"parameters": parameters} if parameters else {})


def generated(live: LiveServer, adapter: str) -> httpx.Response:
    return live.post(
        "/v2/models/rill/generate", {"text_input": "Hi", "max_tokens": 2, "parameters": {"lora_name": adapter}}
    )


def test_the_repository_api_loads_and_unloads_them_too(changing: LiveServer) -> None:
    assert repository(changing, "load", "sql", lora_path="/adapters/sql", base_model_name="rill").status_code == 200
    assert repository(changing, "load", "rill:chat", lora_path="/adapters/chat").status_code == 200
    rows = changing.post("/v2/repository/index", {}).json()
    assert [row["name"] for row in rows] == ["rill", "rill:chat", "rill:sql"]
    assert rows[1] == {"name": "rill:chat", "version": "1", "state": "READY"}
    assert changing.get("/v2/models/rill:chat/ready").status_code == 200
    assert listed(changing) == {"rill": None, "rill:chat": "/adapters/chat", "rill:sql": "/adapters/sql"}
    assert generated(changing, "sql").status_code == 200
    reloaded = repository(changing, "load", "rill:sql", lora_path="/adapters/new")
    assert (reloaded.status_code, listed(changing)["rill:sql"]) == (200, "/adapters/new"), "as a model is reloaded"
    assert repository(changing, "unload", "sql").status_code == 200
    assert repository(changing, "unload", "chat", base_model_name="rill").status_code == 200
    assert listed(changing) == {"rill": None}
    refused = generated(changing, "sql")
    assert (refused.status_code, "must be an adapter of this model" in refused.text) == (400, True)
    assert changing.get("/v2/models/rill:chat/ready").status_code == 400


@pytest.mark.parametrize(
    ("name", "parameters", "status", "words"),
    [
        ("sql", {"lora_path": "/adapters/broken"}, 400, "/adapters/broken is broken"),
        ("sql", {"lora_path": ""}, 400, "lora_path must be a path"),
        ("sql", {"lora_path": "/a", "config": "{}"}, 400, "neither goes with 'config' or files"),
        ("sql", {"base_model_name": "rill"}, 400, "is loaded with 'lora_path'"),
        ("sql", {"lora_path": "/a", "base_model_name": "nobody"}, 400, "base_model_name must be one of rill"),
        ("rill", {"lora_path": "/a"}, 400, "lora_name must be MODEL:NAME"),
        ("sql", {"lora_path": 7}, 400, "lora_path"),
    ],
)
def test_the_repository_api_refuses_what_is_no_adapter(
    changing: LiveServer, name: str, parameters: dict[str, Any], status: int, words: str
) -> None:
    answer = repository(changing, "load", name, **parameters)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text
    assert listed(changing) == {"rill": None}


def test_adapters_of_a_model_that_has_none_are_refused_in_its_words(live: LiveServer) -> None:
    assert "was started without LoRA adapters" in generated(live, "sql").text
    assert repository(live, "load", "sql", lora_path="/adapters/sql").status_code == 403


def test_our_own_engine_does_not_sleep(live: LiveServer) -> None:
    for answer in (live.post("/sleep?level=1", {}), live.post("/wake_up", {})):
        assert (answer.status_code, "--enable-sleep-mode" in answer.json()["error"]["message"]) == (404, True)
    assert live.get("/is_sleeping").json() == {"is_sleeping": False}
    assert live.post("/sleep?level=3", {}).json()["error"]["param"] == "level"
    assert live.post("/sleep?mode=soon", {}).json()["error"]["param"] == "mode"
    assert live.post("/wake_up?tags=all", {}).json()["error"]["param"] == "tags"
    assert live.post("/sleep?model=nobody", {}).status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "param"),
    [
        ("a", "/adapters/broken", "lora_name"),
        ("a", "/adapters/\x00", "lora_path"),
        ("", "/a", "lora_name"),
        ("a", "/" + "a" * 5000, "lora_path"),
        ("rill:a b", "/a", "lora_name"),
        ("rill", "/a", "lora_name"),
        (7, "/a", "lora_name"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(changing: LiveServer, name: Any, path: str, param: str) -> None:
    answer = change(changing, "load", name, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert listed(changing) == {"rill": None}
    assert ask(changing).status_code == 200


def test_adapters_are_fixed_unless_the_operator_allows_more(capable: LiveServer) -> None:
    for answer in (change(capable, "load", "sql", "/adapters/sql"), change(capable, "unload", "polite")):
        assert answer.status_code == 403
        assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]
