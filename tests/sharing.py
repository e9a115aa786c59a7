"""Which files of tests go to the same worker of pytest-xdist."""

from xdist.scheduler import LoadFileScheduling

TOGETHER = (
    ("tests/gateway/api/anthropic/",),
    ("tests/gateway/api/ollama/",),
    ("tests/serving/repository/stores/",),
    ("tests/triton/test_c", "tests/triton/test_exam.py", "tests/triton/test_response", "tests/triton/test_streams.py"),
)
"""Beginnings of the names of files that share what is costly to start or to import. One worker runs them all."""


class SharingScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives each file to one worker, and those that share a start to the same."""

    def _split_scope(self, nodeid: str) -> str:
        shared = (group[0] for group in TOGETHER if nodeid.startswith(group))
        return next(shared, super()._split_scope(nodeid))
