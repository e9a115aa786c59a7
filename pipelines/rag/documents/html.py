"""HTML: the main content of a page, as light Markdown."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from selectolax.lexbor import LexborHTMLParser

from pipelines.rag.documents.encoding import decoded
from pipelines.rag.documents.extract import Extract
from pipelines.rag.documents.html_elements import ElementWriter
from sluice.errors import invalid

_DECLARED = re.compile(rb"""<(?:meta\s[^>]*?charset|\?xml\s[^>]*?encoding)\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)
_DECLARED_WITHIN = 1024
"""In its first 1024 bytes a page says what its encoding is: the HTML standard."""
_WINDOWS_1252 = frozenset({"ascii", "us-ascii", "iso-8859-1", "iso8859-1", "latin1", "latin-1"})
"""What browsers take these names for: the HTML standard again."""

_MAIN = ("main", "[role=main]", "article")
_AROUND_MAIN = frozenset({"header", "aside"})
"""Not content around the main part, and content in it."""
_NO_CONTENT = frozenset(
    [
        "audio",
        "button",
        "canvas",
        "datalist",
        "embed",
        "footer",
        "head",
        "iframe",
        "input",
        "map",
        "math",
        "nav",
        "noscript",
        "object",
        "script",
        "select",
        "style",
        "svg",
        "template",
        "textarea",
        "video",
    ]
)
_NOT_SHOWN = (
    "[hidden], [aria-hidden=true], [role=navigation], [role=banner], [role=contentinfo], [role=search], a.headerlink"
)


class Visit(NamedTuple):
    """A piece of text, or an element that begins or ends."""

    tag: str
    node: Any
    is_end: bool = False


def read(content: bytes) -> Extract:
    """Title is the only h1 of the main part, else the page's title."""
    tree = LexborHTMLParser(_text(content))
    title = tree.css_first("title")
    extract = _written(tree, _main_of(tree), "" if title is None else title.text())
    return extract if extract.text or tree.body is None else _written(tree, tree.body, extract.title)


def _text(content: bytes) -> str:
    declared = _DECLARED.search(content[:_DECLARED_WITHIN])
    name = declared[1].decode().lower() if declared else "utf-8"
    # A declaration that can be read byte by byte is not in UTF-16, whatever it says: the HTML standard.
    name = "utf-8" if name.startswith("utf-16") else "windows-1252" if name in _WINDOWS_1252 else name
    try:
        return decoded(content, name)
    except LookupError:
        raise invalid("content", f"the page declares the encoding {name[:40]!r}, which is not known") from None


def _main_of(tree: LexborHTMLParser) -> Any:
    """The element that holds what the page is about."""
    for selector in _MAIN:
        found = tree.css(selector)
        if len(found) == 1:
            return found[0]
    return tree.body


def _written(tree: LexborHTMLParser, root: Any, title: str) -> Extract:
    if root is None:
        return Extract("", title)
    not_shown = {node.mem_id for node in tree.css(_NOT_SHOWN)} - {root.mem_id}
    unwanted = _NO_CONTENT if root.tag != "body" else _NO_CONTENT | _AROUND_MAIN
    elements = ElementWriter()
    for visit in _visits(root, lambda tag, node: tag in unwanted or node.mem_id in not_shown):
        if visit.tag == "-text":
            elements.text(visit.node.text_content or "")
        elif visit.is_end:
            elements.end(visit.tag)
        else:
            elements.start(visit.tag, visit.node)
    return elements.writer.extract(title)


def _visits(root: Any, is_unwanted: Callable[[str, Any], bool]) -> Iterator[Visit]:
    """The tree in the document's order. No recursion: pages may be nested a hundred thousand deep."""
    above: list[tuple[str, Any]] = []
    node = root
    while True:
        tag = node.tag or ""
        if tag == "-text":
            yield Visit(tag, node)
        elif not tag.startswith("-") and not (above and is_unwanted(tag, node)):
            yield Visit(tag, node)
            child = node.first_child
            if child is not None:
                above.append((tag, node))
                node = child
                continue
            yield Visit(tag, node, is_end=True)
        while above and node.next is None:
            tag, node = above.pop()
            yield Visit(tag, node, is_end=True)
        if not above:
            return
        node = node.next
