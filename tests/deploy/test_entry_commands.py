"""The image's commands, run without Docker as the image would run them.

They run as a user without rights or capabilities on a read-only root: only the volumes and /tmp can be written.
"""

import os
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.container import IMAGE, USER, Container, made_container
from tests.deploy.dockerfile import DOCKERFILES
from tests.paths import ROOT
from tests.server_process import running_server
from tests.waiting import PATIENCE_S, wait_until

KEY = "a key"


@pytest.fixture
def container() -> Iterator[Container]:
    with made_container() as made:
        yield made


def test_the_container_is_as_closed_as_it_should_be(container: Container) -> None:
    """The restrictions hold, or the other tests would prove nothing."""
    shown = container.run(
        "sh", "-c", "id -u; grep CapEff /proc/self/status; touch $HOME/a && touch $TMPDIR/a && echo wrote"
    )
    assert shown.stdout.split() == [USER, "CapEff:", "0" * 16, "wrote"]
    for place in ("/tmp", "/var/tmp"):
        assert "Read-only" in container.run("touch", f"{place}/written").stderr


def test_the_gpu_image_s_engine_has_another_python_than_its_gateway(tmp_path: Path) -> None:
    """An interpreter of another name alone finds TensorRT-LLM (the stand-in), with the paths of this machine."""
    other = tmp_path / "image-python"
    other.symlink_to(sys.executable)
    stand_in = ROOT / "tests" / "stand_ins"
    libraries = os.pathsep.join((str(stand_in), str(ROOT), sysconfig.get_path("purelib")))
    python = tmp_path / "engine-python"
    text = (DOCKERFILES[1].parent / "engine-python").read_text()
    python.write_text(text.replace("/usr/bin/python3", str(other)).replace("/opt/sluice-engine", libraries))
    python.chmod(0o755)
    arguments = (f"--engine-python={python}", "--runtime=tensorrt_llm")
    with running_server(ROOT / "models" / "rill", tmp_path / "log", *arguments) as server:
        server.wait_ready()
        engine = server.engine()
        assert engine.cmdline()[0] == str(other)
        assert engine.environ()["PYTHONPATH"] == libraries
        with server.client() as client:
            answer = client.post("/v1/completions", json={"model": server.model, "prompt": "Hello", "max_tokens": 3})
            assert answer.status_code == 200, answer.text


@pytest.mark.long
def test_the_image_s_command_serves_and_its_probe_says_so(container: Container, tmp_path: Path) -> None:
    assert not container.is_healthy("http://127.0.0.1:1")
    log_path = tmp_path / "log"
    with container.serving(log_path, SLUICE_API_KEY=KEY) as (process, base_url):
        wait_until(lambda: container.is_healthy(base_url), lambda: log_path.read_text())
        with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S) as client:
            body = {"model": "rill", "messages": [{"role": "user", "content": "Hello!"}]}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"]
            put = client.put("/v1/rag/docs/documents/a.md", content="# Pumps\n\nOil them every 40 days.\n")
            assert put.status_code == 201, put.text
        process.send_signal(getattr(signal, IMAGE.texts("STOPSIGNAL")[0]))
        assert process.wait(PATIENCE_S) == 0, log_path.read_text()
    assert (container.writable / "lib" / "sluice" / "rag.sqlite").is_file()
    assert "Traceback" not in log_path.read_text()
    assert list((container.writable / "tmp").glob("sluice-*")) == []
