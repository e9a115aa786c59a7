"""Measures the code for docs/reference/structure.md: its size, and the files that requests run through."""

import tempfile
from pathlib import Path
from statistics import median

from tests.layers import arrows, modules, points_down
from tests.tools.markdown import code, table
from tests.tools.request_paths import REQUESTS, traced_server
from tests.tools.structure import num_lines

MEASUREMENTS = ("structure", *(f"path-{name.lower()}" for name in REQUESTS))


def measure() -> dict[str, str]:
    """Return the contents of the blocks of `MEASUREMENTS`. Starts a server."""
    return {"structure": _structure(), **{f"path-{name.lower()}": _listed(files) for name, files in paths().items()}}


def paths() -> dict[str, list[str]]:
    """Return the files that warm requests of each kind run through. Starts a server."""
    with tempfile.TemporaryDirectory() as folder, traced_server(Path(folder)) as server:
        return {name: server.files_of(request) for name, request in REQUESTS.items()}


def _structure() -> str:
    rows = []
    packages = {module.partition(".")[0] for module in modules()}
    sizes = {name: [num_lines(p) for m, p in modules().items() if m.partition(".")[0] == name] for name in packages}
    for name in sorted(packages):
        rows.append([code(f"{name}/"), *_sizes(sizes[name])])
    rows.append(["all", *_sizes([size for each in sizes.values() for size in each])])
    wrong = sum(not points_down(module, target) for module, target in arrows())
    return f"{table(('Package', 'Files', 'Lines', 'Median file'), rows)}\n\nImports that do not point down: {wrong}."


def _sizes(sizes: list[int]) -> list[str]:
    return [str(len(sizes)), f"{sum(sizes):,}", f"{median(sizes):g}"]


def _listed(files: list[str]) -> str:
    return f"{len(files)} files:\n\n" + "\n".join(f"- `{file}`" for file in files)
