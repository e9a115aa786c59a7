"""/docs describes the routes that exist."""

import re

from gateway.http.openapi import v2_paths
from tests.gateway.http.v2.small_server import SmallServer


def test_every_described_path_is_there(small: SmallServer) -> None:
    for path, operations in v2_paths().items():
        asked = re.sub(r"\{(model|region)\}", "nope", path)
        for method in operations:
            error = small.client.request(method.upper(), asked).text
            assert "Not Found" not in error, (method, path)
            assert "Method Not Allowed" not in error, (method, path)
        assert small.client.request("PATCH", asked).status_code == 405, path


def test_parameters_of_a_path_are_declared() -> None:
    for path, operations in v2_paths().items():
        for operation in operations.values():
            declared = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
            assert declared == set(re.findall(r"\{(\w+)\}", path))
            assert operation["summary"]
