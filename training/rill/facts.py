"""Reads facts from pages: a name, and what the documentation says about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.rill.pages import Block
from training.rill.text import is_plain_english, tidy

_SPHINX = frozenset({"python", "django", "scipy"})
_SPHINX_LISTS = (
    './/dl[contains(@class,"py") or contains(@class,"c ") or contains(@class,"glossary") or contains(@class,"std")]'
)
_LINKS = './/a[contains(@class,"headerlink") or contains(@class,"viewcode")]|.//span[contains(@class,"viewcode-link")]'
_KINDS = (
    "function", "classmethod", "staticmethod", "method", "class", "attribute", "exception", "data",
    "property", "module", "opcode", "option", "envvar", "macro", "member", "type",
)  # fmt: skip
_MEMBERS = frozenset({"method", "classmethod", "staticmethod", "attribute", "property"})
_NOT_A_DESCRIPTION = re.compile(
    r"(New in version|Changed in version|Deprecated|Bases:|Availability|See also|Note|Source code)"
)
_TYPE_SUFFIX = re.compile(r" \((integer|boolean|string|enum|floating point)\)$")
# Headings that do not name the subject of their section.
_EMPTY_HEADING = re.compile(
    r"^(description|notes?|synopsis|arguments|parameters|examples?|return values?|see also|overview|introduction"
    r"|usage|compatibility|outputs?|errors|the problem|problem|summary|options|footnotes|general|.* objects?"
    r"|warning|limitations|exit status|environment|files|rationale|basic usage|other|definitions?|syntax|abstract"
    r"|implementation|todo|background|purpose)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and what a page says about it. `body` is the first paragraph of its description."""

    source: str
    kind: str
    name: str
    signature: str
    body: str
    page: str


def _first_paragraph(node: Any) -> str:
    for child in node:
        if child.tag == "p":
            text = tidy(child.text_content())
            if not _NOT_A_DESCRIPTION.match(text):
                return text
        elif child.tag == "div" and "version" not in (child.get("class") or "") and (inner := child.xpath("./p")):
            return tidy(inner[0].text_content())
    return tidy(node.text or "")


def _class_text(node: Any, css_class: str) -> str:
    return "".join(node.xpath(f'.//span[contains(@class,"{css_class}")]//text()'))


def _sphinx_name(term: Any, kind: str, signature: str) -> str:
    anchor = term.get("id")
    if kind in _MEMBERS and anchor:
        return ".".join(anchor.split(".")[-2:])
    return tidy(_class_text(term, "descclassname") + _class_text(term, "descname")) or signature


def _sphinx_entry(term: Any, description: Any, css_class: str) -> tuple[str, str, str, str]:
    for link in term.xpath(_LINKS):
        link.drop_tree()
    signature = tidy(term.text_content())
    body = _first_paragraph(description)
    if "glossary" in css_class:
        return "glossary", signature, "", body
    kind = next((kind for kind in _KINDS if kind in css_class), "other")
    return kind, _sphinx_name(term, kind, signature), signature, body


def _sphinx(main: Any) -> Iterator[tuple[str, str, str, str]]:
    for listing in main.xpath(_SPHINX_LISTS):
        term = None
        for child in listing:
            if child.tag == "dt":
                term = child if term is None else term  # aliases share one description
            elif child.tag == "dd" and term is not None:
                yield _sphinx_entry(term, child, listing.get("class") or "")
                term = None


def _postgres_command(main: Any) -> Iterator[tuple[str, str, str, str]]:
    for paragraph in main.xpath('.//div[@class="refnamediv"]/p')[:1]:
        name, dash, summary = tidy(paragraph.text_content()).partition(" — ")
        if not dash:
            return
        synopsis = main.xpath('.//div[@class="refsynopsisdiv"]//pre')
        signature = tidy(synopsis[0].text_content())[:300] if synopsis else ""
        yield "command", name, signature, summary
        for description in main.xpath('.//div[@class="refsect1"][h2="Description"]/p')[:1]:
            yield "command description", name, signature, tidy(description.text_content())


def _postgres_term_kind(term: str, page: str) -> str:
    if "glossary" in page:
        return "glossary"
    return "setting" if "config" in page or _TYPE_SUFFIX.search(term) else "term"


def _postgres(main: Any, page: str) -> Iterator[tuple[str, str, str, str]]:
    yield from _postgres_command(main)
    for listing in main.xpath('.//dl[@class="variablelist" or @class="glosslist"]|.//div[@class="glossary"]//dl'):
        term = ""
        for child in listing:
            if child.tag == "dt":
                term = tidy(child.text_content())
            elif child.tag == "dd" and term:
                yield _postgres_term_kind(term, page), term, "", _first_paragraph(child)
                term = ""
    for cell in main.xpath('.//td[@class="func_table_entry"]'):
        lines = [tidy(paragraph.text_content()) for paragraph in cell.xpath("./p")]
        if len(lines) >= 2 and (name := re.match(r"([a-z_0-9]+) ?\(", lines[0])):
            yield "SQL function", name[1], lines[0], lines[1]


def _apache(main: Any) -> Iterator[tuple[str, str, str, str]]:
    for section in main.xpath('.//div[@class="directive-section"]'):
        heading = section.xpath("./h2//a[@id]/text()|./h2/a/text()")
        rows = {
            tidy("".join(row.xpath("./th//text()"))).rstrip(":"): tidy("".join(row.xpath("./td//text()")))
            for row in section.xpath('.//table[@class="directive"]//tr')
        }
        if heading and "Description" in rows:
            yield "directive", tidy(heading[0]), rows.get("Syntax", ""), rows["Description"].rstrip(".") + "."


def _sections(blocks: list[Block]) -> Iterator[tuple[str, str, str, str]]:
    heading = ""
    for block in blocks:
        if block.kind in {"h1", "h2", "h3", "h4"}:
            heading = re.sub(r"^[\dA-Z]{1,3}(\.\d+)*\.? ", "", block.text)
        elif block.kind == "p" and heading:
            if 4 <= len(heading) <= 70 and len(block.text) > 70 and not _EMPTY_HEADING.match(heading.strip()):
                yield "section", heading, "", block.text
            heading = ""


def _module(title: str, blocks: list[Block]) -> Iterator[tuple[str, str, str, str]]:
    name, dash, _ = title.partition(" — ")
    opening = re.compile(rf"(This module|The \w+ module|The {re.escape(name)})")
    body = next((block.text for block in blocks if block.kind == "p" and opening.match(block.text)), "")
    if dash and body:
        yield "module", name, "", body.replace("This module", f"The {name} module", 1)


def _is_usable(name: str, body: str) -> bool:
    return 0 < len(name) <= 60 and len(body) >= 25 and is_plain_english(body) and not _NOT_A_DESCRIPTION.match(body)


def page_facts(source: str, page: str, title: str, main: Any, blocks: list[Block]) -> Iterator[Fact]:
    """Yield all facts of one page. Headings are read first, since the other readers edit the tree."""
    found = list(_sections(blocks))
    if source == "python":
        found += _module(title, blocks)
    if source in _SPHINX:
        found += _sphinx(main)
    elif source == "postgres":
        found += _postgres(main, page)
    elif source == "apache":
        found += _apache(main)
    for kind, raw_name, signature, body in found:
        name = _TYPE_SUFFIX.sub("", raw_name).strip()
        if kind not in {"section", "option", "term"}:
            name = name.partition("(")[0].strip()
        if _is_usable(name, body) and not (kind == "term" and len(name.split()) > 4):
            yield Fact(source, kind, name, signature if len(signature) < 220 else "", body, page)
