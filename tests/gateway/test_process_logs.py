"""The lines of a server's engine at the endpoint that shows the log."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.server_process import running_server


def test_a_warning_of_an_engine_is_shown(tmp_path: Path) -> None:
    """The engine logs it while it loads its model. What workers log is in `workers/test_serving.py`."""
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    weights = load_file(checkpoint / "model.safetensors")
    save_file({**weights, "model.spare.weight": np.ones(4, np.float32)}, checkpoint / "model.safetensors")
    with running_server(checkpoint, tmp_path / "log") as server, server.client() as client:
        server.wait_ready()
        lines = client.get("/v1/admin/logs", params={"level": "warning"}).json()["data"]
        [told] = [line for line in lines if "model.spare.weight" in line["message"]]
        assert told["process"] == f"engine-{server.engine().pid}"
        assert (told["level"], told["request_id"]) == ("WARNING", "-")
        assert told["logger"].startswith("sluice.engine.models")
        assert told["message"] in server.log, "the log itself still has it"
