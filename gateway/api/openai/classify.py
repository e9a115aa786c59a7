"""`POST /classify`, in vLLM's shape: the classes of texts, by the repository's classifiers."""

import time
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from pydantic import Field

from sluice.gateway.api.openai.embeddings import Input, TokenLimit
from sluice.gateway.api.openai.schemas import MAX_MODEL_CHARS, UNUSED
from sluice.gateway.calls import note_prompt
from sluice.gateway.front.http.bodies import dump_list, read_fields
from sluice.gateway.front.http.errors import TIMEOUT_HEADER
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import RequestObject
from sluice.gateway.front.http.request import get_request_id, run_in_time
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.encoding.classifier import TextClassifier
from sluice.pipelines.encoding.signature import Inputs


class ClassificationRequest(RequestObject):
    """`POST /classify`."""

    example = '{"model": "topics", "input": ["one text", "another"]}'
    model: str = Field(max_length=MAX_MODEL_CHARS, description="A model of the repository whose output has labels.")
    input: Input
    use_activation: bool | None = Field(None, description="Whether scores become probabilities, as by default.")
    activation: bool | None = Field(None, description="The older name of use_activation.")
    truncate_prompt_tokens: TokenLimit | None = Field(
        None, description="Most tokens of an input, which is cut; -1 is what the model takes."
    )
    user: str | None = Field(None, description=UNUSED)


def router(plane: Plane, config: ServeConfig) -> APIRouter:
    """Return the route, which answers from `plane`."""
    api = APIRouter(tags=["OpenAI"], default_response_class=Response)

    @api.post("/classify", openapi_extra=describe_body(ClassificationRequest, (TIMEOUT_HEADER,)))
    async def classify(request: Request) -> Response:
        """Classify one text or several."""
        fields, headers = await read_fields(request, ClassificationRequest, config.http)
        classifier = plane.encoding.classifier(fields.model)
        head = {
            "id": f"classify-{get_request_id(request)}",
            "object": "list",
            "created": int(time.time()),
            "model": fields.model,
        }
        body = await run_in_time(request, config.requests, _write_answer(classifier, fields, head))
        return Response(body, headers=headers, media_type="application/json")

    return api


async def _write_answer(classifier: TextClassifier, fields: ClassificationRequest, head: dict[str, Any]) -> bytes:
    inputs = fields.input
    is_single = isinstance(inputs, str) or isinstance(inputs[0], int)
    found = await classifier.classify(
        cast(Inputs, [inputs] if is_single else inputs),
        lambda index: "input" if is_single else f"input[{index}]",
        truncate_to=fields.truncate_prompt_tokens,
        activates=fields.use_activation is not False and fields.activation is not False,
    )
    num_classes, labels = len(found.labels), found.labels
    data = (
        {"index": index, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": num_classes}
        for index, row in enumerate(found.scores)
    )
    note_prompt(found.num_tokens)
    usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens, "completion_tokens": 0}
    return await dump_list({**head, "usage": usage}, "data", data, len(found.scores), found.scores.size)
