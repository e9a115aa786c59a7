"""`python -m benchmarks.gpu.report SUMMARY.json`: writes what has run on a GPU into docs/gpus.md."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.aims import judge
from benchmarks.gpu.parts import PARTS, outcome

PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"
SECTION = re.compile(r"(<!-- measured: gpu -->\n).*?(<!-- end -->)", re.DOTALL)
_ASIDE = "not run"


class ReportError(Exception):
    """A summary that says nothing about a GPU. The message says why."""


def section(summary: dict[str, Any]) -> str:
    """Return the tables of a run. Raises ReportError for one that was not on a GPU, or of small shapes."""
    if summary["device"] != "cuda" or summary["is_tiny"]:
        raise ReportError("only a run on a GPU with whole shapes is recorded, without --tiny and --device cpu")
    parts = [(part.claim, *_result(summary["parts"].get(part.name))) for part in PARTS]
    aims = [
        (label, accept, aim, value or "–", verdict, published or "–")
        for label, accept, aim, value, verdict, published in judge(summary)
    ]
    return "\n\n".join(
        (
            _machine(summary),
            _table(("part", "outcome", "seconds"), parts),
            _table(("share of what the GPU reaches", "to accept", "aim", "is", "verdict", "published by others"), aims),
        )
    )


def _result(result: dict[str, Any] | None) -> tuple[str, str]:
    return (_ASIDE, "") if result is None else (outcome(result).replace("|", "\\|"), f"{result['seconds']:.0f}")


def _machine(summary: dict[str, Any]) -> str:
    figures = summary["parts"].get("versions", {}).get("figures", {})
    packages, gpu = figures.get("packages", {}), figures.get("gpu", {}).get("name", "a GPU")
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton", "transformers") if name in packages)
    driver = figures.get("driver", {}).get("version", "unknown")
    day = summary["measured_at"][:10]
    return f"{day}, commit {summary['commit']}: {gpu}, driver {driver}, {versions}."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def fill(page: str, content: str) -> str:
    """Return the page with another section."""
    return SECTION.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", page)


def main(argv: list[str]) -> int:
    try:
        content = section(json.loads(Path(argv[0]).read_text()))
    except (IndexError, OSError, ValueError, ReportError) as error:
        sys.stderr.write(f"python -m benchmarks.gpu.report SUMMARY.json: {error}\n")
        return 2
    PAGE.write_text(fill(PAGE.read_text(), content))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
