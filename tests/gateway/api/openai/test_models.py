import openai
import pytest

from sluice.gateway.api.openai.schemas import ChatCompletionRequest
from sluice.gateway.front.http.errors import QUEUE_TIMEOUT_HEADER, TIMEOUT_HEADER
from sluice.gateway.front.http.request import PRIORITY_HEADER
from sluice.gateway.plane.models import STICKY_HEADER
from sluice.gateway.tenancy.access.control import TENANT_HEADER
from sluice.pipelines.text.types import OWNER_KEY_HEADER
from tests.gateway.front.http.live import LiveServer


def test_the_list_and_each_model(live: LiveServer, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("rill", "model", "sluice")
    assert model.created == live.model.created
    assert client.models.retrieve("rill") == model
    assert live.get("/v1/models/rill").json()["max_model_len"] == 1024


@pytest.mark.parametrize("name", ["nope", "some/owner's"])
def test_unknown(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve(name)
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"


def test_while_loading_there_is_none(loading_live: LiveServer) -> None:
    assert loading_live.get("/v1/models").json() == {"object": "list", "data": []}
    assert loading_live.get("/v1/models/rill").status_code == 503


def test_the_docs_show_the_bodies(live: LiveServer) -> None:
    paths = live.get("/openapi.json").json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_completion_tokens", "top_k", "stop"} <= body["properties"].keys()
    assert sorted(body["required"]) == ["messages", "model"]
    assert "$ref" not in str(body)
    assert body["properties"].keys() == {
        declared.alias or name for name, declared in ChatCompletionRequest.model_fields.items()
    }
    headers = paths["/v1/completions"]["post"]["parameters"]
    assert {TENANT_HEADER, PRIORITY_HEADER, TIMEOUT_HEADER, QUEUE_TIMEOUT_HEADER, STICKY_HEADER, OWNER_KEY_HEADER} == {
        header["name"] for header in headers
    }
