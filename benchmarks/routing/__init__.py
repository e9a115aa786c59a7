"""The router: what a decision takes, what a fleet gains by it, and how far the simulation is off a measured server."""

from pathlib import Path

from benchmarks.figures import Figure, ReportProgress
from benchmarks.routing import beside_peers, decisions, fleets, live, measured


def measure(num_repeats: int, folder: Path, model: Path | None, only: str, report: ReportProgress) -> list[Figure]:
    """Measure the parts whose names have `only` in them: decisions, fleets, peers, live (with model M), measured (with
    the bundled model or the checkpoint `model`)."""
    figures: list[Figure] = []
    if only in "decisions":
        figures += decisions.measure(num_repeats)
    if only in "fleets":
        figures += fleets.measure(report)
    if only in "peers":
        figures += beside_peers.measure(folder, report)
    if only in "live":
        figures += live.measure(num_repeats, folder, report)
    if only in "measured":
        figures += measured.measure(num_repeats, folder, model, report)
    return figures
