"""schemathesis makes requests from the OpenAPI document: whatever they are, none ends in a server error."""

import subprocess
import sys
from pathlib import Path

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
WITHOUT = ".*(repository|shared|trace|logging|admin/live|admin/logs|admin/profile).*"
"""Routes that would change the server for the other requests, and those whose answers go on, as somebody watches."""


def test_no_request_is_a_server_error(url: str, tmp_path: Path) -> None:
    command = [
        *(Path(sys.executable).with_name("schemathesis"), "--config-file", CONFIGURATION, "run", f"{url}/openapi.json"),
        *("--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--exclude-path-regex", WITHOUT),
        *("--request-timeout", "30", "--seed", "1", "--no-color"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
