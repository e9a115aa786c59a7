"""The worker ranks: real processes, so that one can be killed."""

import subprocess
import sys

_WAIT = "import sys; sys.stdin.read()"


class Ranks:
    """One process a rank where there are several; they end when this process does."""

    def __init__(self, world_size: int) -> None:
        count = world_size if world_size > 1 else 0
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", _WAIT, f"stand-in-rank={rank}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(count)
        ]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def dead(self) -> int | None:
        """The number of a rank that is gone, None while all live."""
        return next((rank for rank, process in enumerate(self._processes) if process.poll() is not None), None)

    def kill_last(self) -> None:
        if self._processes:
            self._processes[-1].kill()
            self._processes[-1].wait()

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
            process.kill()
            process.wait()
