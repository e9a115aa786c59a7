"""The way in docs/getting-started.md to make and serve a checkpoint of one's own."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.paths import DOCS, ROOT
from tests.server_process import running_server

PAGE = (DOCS / "getting-started.md").read_text()
SNIPPET = re.search(r"```python\n(from transformers import .*?)```", PAGE, re.DOTALL)


def test_it_is_three_statements() -> None:
    assert SNIPPET is not None
    assert len(ast.parse(SNIPPET[1]).body) == 3


@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed, and the model's weights need it")
def test_a_model_made_with_transformers_is_served(tmp_path: Path) -> None:
    assert SNIPPET is not None
    (tmp_path / "models").symlink_to(ROOT / "models")
    subprocess.run([sys.executable, "-c", SNIPPET[1]], check=True, cwd=tmp_path)
    with running_server(tmp_path / "my-model", tmp_path / "log", "--served-model-name", "my-model") as server:
        server.wait_ready()
        body = {"model": "my-model", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=30).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] >= 1
