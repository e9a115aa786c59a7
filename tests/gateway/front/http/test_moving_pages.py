"""The pages on moving to Sluice and on GPUs name flags, routes and metrics that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.engine.delegated.vllm.settings import SETTINGS
from sluice.gateway.options.command_line import _parser
from sluice.load.options import parser as load_parser
from tests.gateway.front.http.live import LiveServer
from tests.paths import DOCS

PAGES = [*sorted(DOCS.glob("moving-from-*.md")), DOCS / "sharing-gpus.md", DOCS / "gpus.md"]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
_METRIC = re.compile(r"\bsluice_[a-z_]+")
_ROUTE = re.compile(r"`(/(?:v1|v2|tokenize|detokenize|ping|health|version|metrics)[^`]*)`")


def columns(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the cells of the page's tables that say what is here, with what was there before."""
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    title = ""
    for row in (row for row in rows if len(row) == 2):
        cells = [cell.strip() for cell in row]
        if cells[1] == "Sluice" or cells[0] == "Flags of vLLM":
            title = cells[1]
        elif title == "Sluice" and set(cells[0]) != {"-"}:
            yield cells[0], cells[1]


def commands(page: Path, name: str) -> Iterator[str]:
    """Yield the indented commands `sluice NAME`, with the lines that continue them."""
    text = re.sub(r"\\\n", " ", page.read_text())
    return (found[0].partition(" #")[0] for found in re.finditer(rf"^    .*sluice {name} .*$", text, re.MULTILINE))


@EACH_PAGE
def test_flags_exist(page: Path) -> None:
    known = set(_parser().flags)
    cells = [here for _, here in columns(page)]
    named = {flag for text in (*cells, *commands(page, "serve")) for flag in _FLAG.findall(text)}
    assert named - known == set()
    loads = {flag for text in commands(page, "load") for flag in _FLAG.findall(text)}
    assert loads - set(load_parser()._option_string_actions) == set()


def test_engine_arguments_are_vllms() -> None:
    page = (DOCS / "moving-from-vllm.md").read_text()
    named = set(re.findall(r"--runtime-setting ([a-z_]+)=", page))
    assert named
    assert named <= set(SETTINGS)


@EACH_PAGE
def test_metrics_exist(page: Path) -> None:
    known = set(_METRIC.findall((DOCS / "metrics.md").read_text()))
    assert set(_METRIC.findall(page.read_text())) <= known


def test_routes_of_nim_are_answered_as_stated(live: LiveServer) -> None:
    """Those in the column of ours are routed, and those that have no equal are 404."""
    known = {re.sub(r"\{\w+\}", "{}", path) for path in live.get("/openapi.json").json()["paths"]}
    rows = [(old, here) for old, here in columns(DOCS / "moving-from-nim.md") if _ROUTE.search(here) or "/v1/" in old]
    named = {re.sub(r"\{\w+\}", "{}", route) for _, here in rows for route in _ROUTE.findall(here)}
    assert len(named) > 15
    assert named - {"/metrics"} <= known
    for old, here in rows:
        if here.startswith("none") or "/v1/health" in old:
            for route in re.findall(r"/v1/[\w/]+", old):
                assert live.get(route).status_code == 404, route
