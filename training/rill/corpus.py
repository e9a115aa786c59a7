"""Step 1: reads documentation packages into `pages.jsonl` and `facts.jsonl`."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path

from lxml import html
from tqdm import tqdm

from training.rill.docstrings import docstring_facts
from training.rill.facts import Fact, page_facts
from training.rill.pages import as_text, main_element, paragraphs, read_blocks
from training.rill.sources import SOURCES, Source, fetch
from training.rill.text import stable_hash, tidy

WORK = Path("build/rill")


@dataclass(frozen=True, slots=True)
class Page:
    name: str
    source: str
    text: str
    paragraphs: list[str]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Pages and facts for training and for evaluation (held out), split by page."""

    pages: list[Page]
    facts: list[Fact]
    held_out_pages: list[Page]
    held_out_facts: list[Fact]


def is_held_out(page: str) -> bool:
    """Whether a page is held out: one page in thirty is never trained on."""
    return stable_hash("pg:" + page) % 30 == 0


def _read_page(job: tuple[str, Path, Path]) -> tuple[Page, list[Fact]] | None:
    source, path, root = job
    tree = html.parse(str(path), parser=html.HTMLParser(encoding="utf-8")).getroot()
    main = main_element(tree) if tree is not None else None
    if main is None:
        return None
    name = f"{source}/{path.relative_to(root)}"
    blocks = read_blocks(main)
    title = next((block.text for block in blocks if block.kind == "h1"), "")
    page = Page(name, source, as_text(blocks), paragraphs(blocks))
    return (page, list(page_facts(source, name, tidy(title), main, blocks))) if len(page.text) >= 300 else None


def _html_files(source: Source, work: Path) -> Iterator[tuple[str, Path, Path]]:
    root = source.folder(work)
    for path in sorted(root.rglob("*.html")):
        if not path.is_symlink() and not re.search(source.skip, "/" + str(path.relative_to(root))):
            yield source.name, path, root


def _write_jsonl(path: Path, rows: Iterable[Page | Fact]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def build(work: Path) -> None:
    """Fetch missing packages, read every page, and write both files."""
    jobs = []
    for source in SOURCES:
        fetch(source, work)
        jobs += list(_html_files(source, work))
    with Pool(2) as pool:
        results = [r for r in tqdm(pool.imap(_read_page, jobs, chunksize=16), total=len(jobs)) if r]
    facts = [fact for _, found in results for fact in found] + list(docstring_facts())
    _write_jsonl(work / "pages.jsonl", (page for page, _ in results))
    _write_jsonl(work / "facts.jsonl", facts)
    size = Counter[str]()
    for page, _ in results:
        size[page.source] += len(page.text)
    count = Counter(fact.source for fact in facts)
    for source in SOURCES:
        print(f"{source.name:12}{size[source.name] / 1e6:6.1f} MB {count[source.name]:6} facts  {source.licence}")


def _short(name: str) -> str:
    return name.rstrip("()").split(".")[-1].lower()


def load(work: Path) -> Corpus:
    """Read the corpus and split it.

    No training fact has the name or the description of a held-out fact, so that the model cannot quote a held-out fact
    from memory.
    """
    pages = [Page(**json.loads(line)) for line in (work / "pages.jsonl").open()]
    facts = [Fact(**json.loads(line)) for line in (work / "facts.jsonl").open()]
    held = [fact for fact in facts if is_held_out(fact.page)]
    held_names = {_short(fact.name) for fact in held}
    kept = [
        fact
        for fact in facts
        if not is_held_out(fact.page) and not (fact.page.startswith("docstring/") and _short(fact.name) in held_names)
    ]
    names = {fact.name for fact in kept}
    openings = {fact.body[:60] for fact in kept}
    return Corpus(
        pages=[page for page in pages if not is_held_out(page.name)],
        facts=kept,
        held_out_pages=[page for page in pages if is_held_out(page.name)],
        held_out_facts=[f for f in held if f.name not in names and f.body[:60] not in openings],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="folder for all intermediate files")
    build(parser.parse_args().work)


if __name__ == "__main__":
    main()
