"""A rank of a model but the first, as a process: `python -m sluice.engine.runners.torch.worker SOCKET PARENT_PID LOG`.
It loads its part of a model, and runs each step that rank 0 runs. It ends with rank 0, whatever either is doing."""

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from sluice.engine.arrays import IntArray
from sluice.engine.config import EngineConfig
from sluice.engine.process.bootstrap import configure_logging
from sluice.engine.process.process_group import end_with
from sluice.engine.runners.torch.followers import Loaded, RankTask, unpack, unpack_step
from sluice.engine.runners.torch.parallel import Meeting, Ranks, join
from sluice.engine.runners.torch.runner import TorchRunner, load_runner
from sluice.errors import SluiceError
from sluice.log_relay import ProcessLog

log = logging.getLogger(__name__)


class RankWorker:
    """Does what rank 0 sends over `connection`."""

    def __init__(self, connection: Connection, meeting: Meeting) -> None:
        self._connection = connection
        self._meeting = meeting
        self._runner: TorchRunner | None = None

    def run(self) -> int:
        """Work until rank 0 closes the connection. Returns the exit code."""
        try:
            while True:
                self._obey(*unpack(self._connection.recv_bytes()))
        except EOFError:
            return 0
        except Exception:
            log.exception("rank %d cannot go on", self._meeting.rank)
            return 1

    def _obey(self, kind: RankTask, arrays: list[IntArray]) -> None:
        if kind is RankTask.LOAD:
            self._load(msgspec.json.decode(self._connection.recv_bytes(), type=EngineConfig))
            return
        runner = self._runner
        assert runner is not None, f"rank 0 sent {kind.name} without a model"
        match kind:
            case RankTask.STEP:
                runner.compute(unpack_step(arrays))
            case RankTask.READ:
                content = np.empty(runner.block_bytes, np.uint8)
                for block in arrays[0].tolist():
                    runner.read_blocks([block], [content])
                    self._connection.send_bytes(content.data)
            case RankTask.WRITE:
                for block in arrays[0].tolist():
                    content = np.frombuffer(bytearray(self._connection.recv_bytes()), np.uint8)
                    runner.write_blocks([block], [content])
            case _:
                assert kind is RankTask.UNLOAD, f"rank 0 sent {kind.name} out of turn"
                runner.close()
                self._runner = None

    def _load(self, config: EngineConfig) -> None:
        try:
            self._runner = load_runner(config, Ranks(self._meeting.rank, self._meeting.size, self._agree))
            self._report(Loaded())
        except SluiceError as error:
            self._report(Loaded.failed(error))

    def _agree(self, num_blocks: int) -> int:
        self._report(Loaded(num_blocks))
        kind, arrays = unpack(self._connection.recv_bytes())
        assert kind is RankTask.AGREED, f"rank 0 sent {kind.name} in place of a number of blocks"
        return int(arrays[0][0])

    def _report(self, loaded: Loaded) -> None:
        self._connection.send_bytes(msgspec.json.encode(loaded))


def main(argv: list[str]) -> int:
    """Follow rank 0 until it ends. Returns the exit code."""
    descriptor, parent, process_log = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with(int(parent), lambda: None)
    configure_logging(ProcessLog.from_argument(process_log))
    with Connection(int(descriptor)) as connection:
        connection.send_bytes(msgspec.json.encode(Loaded()))  # rank 0 need not wait for a process that does not start
        try:
            meeting = msgspec.json.decode(connection.recv_bytes(), type=Meeting)
        except EOFError:
            return 0
        join(meeting)
        return RankWorker(connection, meeting).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # taking torch down in order takes seconds, for which rank 0 would wait
