"""Threads that work ahead while the engine's thread waits for the forward pass."""

import threading
from queue import SimpleQueue
from typing import Protocol


class Task(Protocol):
    """Something that can bring itself up to date, on any thread, at most once."""

    def work_out(self) -> None:
        """Must not raise."""
        ...


class Workers:
    """Who needs a result does not wait for a worker to come to it, but does the work there and then: a slow or
    closed pool costs time and nothing else.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"mask-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        """Returns at once."""
        self._queue.put(task)

    def close(self) -> None:
        """End the threads, after what was submitted."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task.work_out()
