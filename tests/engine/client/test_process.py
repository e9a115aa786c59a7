"""One engine process, from its start to its end."""

from pathlib import Path

import pytest
import zmq

from sluice.engine.client import process as module
from sluice.engine.client.process import EngineProcess
from sluice.engine.config import EngineConfig
from sluice.errors import SluiceError


async def test_what_has_ended_is_not_killed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process id may be another's by then."""
    killed: list[int] = []
    monkeypatch.setattr(module, "kill_session", killed.append)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    child = EngineProcess(context)
    with pytest.raises(SluiceError):
        await child.load("sluice.engine.process", EngineConfig(model_path=str(tmp_path / "nothing")))
    await child.exited
    await child.read_remaining()
    assert killed == [child.pid]
    child.kill()
    await child.close()
    context.term()
    assert killed == [child.pid]
    assert not child.folder.exists()
