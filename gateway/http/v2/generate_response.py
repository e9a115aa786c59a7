"""Responses of the generate extension: one flat JSON object, keys in alphabetical order."""

import orjson

from gateway.http.v2.errors import error_json
from gateway.http.v2.tensor_json import value_json
from serving.model import Model
from serving.request import InferResponse
from sluice.errors import SluiceError

WRONG_COUNT = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class GenerateWriter:
    """Writes the responses to one request."""

    def __init__(self, model: Model, request_id: str) -> None:
        self._head = {
            "model_name": b'"model_name":' + orjson.dumps(model.name),
            "model_version": b'"model_version":"%d"' % model.version,
        }
        if request_id:
            self._head["id"] = b'"id":' + orjson.dumps(request_id)
        self._keys: dict[str, bytes] = {}

    def body(self, response: InferResponse) -> bytes:
        """A response that is no error. Raises SluiceError where an output cannot be JSON."""
        members = self._head.copy()
        for name, value in response.parameters.items():
            members.setdefault(name, self._key(name) + orjson.dumps(value))
        for tensor in response.outputs:
            members.setdefault(tensor.name, self._key(tensor.name) + value_json(tensor))
        return b"{" + b",".join([members[name] for name in sorted(members)]) + b"}"

    def event(self, response: InferResponse) -> bytes:
        """The same, or the error, as a server-sent event."""
        if response.error is not None:
            return error_event(response.error)
        try:
            return b"data: " + self.body(response) + b"\n\n"
        except SluiceError as error:
            return error_event(error)

    def _key(self, name: str) -> bytes:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = orjson.dumps(name) + b":"
        return key


def error_event(error: SluiceError) -> bytes:
    """The event of a response that failed; the stream may go on."""
    return b"data: " + error_json(error) + b"\n\n"
