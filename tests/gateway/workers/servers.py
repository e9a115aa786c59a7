"""Servers with two HTTP workers: how they are started and asked, and what they have counted."""

import httpx

from tests.server_process import MODEL, ServerProcess
from tests.waiting import PATIENCE_S

WORKERS = "--http-workers=2"
PROMPT = {"model": MODEL, "prompt": "Once", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def fetch_metrics(server: ServerProcess) -> dict[str, float]:
    """The values on the metrics page, by name and labels, which are sorted: their order on the page means nothing."""
    lines = httpx.get(server.metrics_url, timeout=PATIENCE_S).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {_with_sorted_labels(name): float(value) for name, value in pairs}


def _with_sorted_labels(series: str) -> str:
    name, brace, labels = series.partition("{")
    return f"{name}{{{','.join(sorted(labels[:-1].split(',')))}}}" if brace else name


def count(server: ServerProcess, prefix: str) -> float:
    return sum(value for name, value in fetch_metrics(server).items() if name.startswith(prefix))
