"""Reads clean text from HTML documentation pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.rill.text import is_plain_english, tidy, words

_MAIN = (
    '//div[@role="main"]', '//div[@class="body"]', "//main", '//div[@id="apicontent"]',
    '//div[@id="page-content"]', '//div[@class="document"]', "//body",
)  # fmt: skip
_SKIP_TAGS = frozenset(words("script style nav head footer header svg img button form noscript math"))
_SKIP_IDS = frozenset(words("toc quickview column1 preamble path footer rustdoc-toc"))
_SKIP_CLASS = re.compile(
    r"sphinxsidebar|headerlink|related|navheader|navfooter|toctree|topic contents|toc\b|breadcrumb|footer"
    r"|sidebar|indexterm|menu|qv|apidocs|viewcode-link|linenos|src\b|stability-|comments_section"
    r"|fancy_title|nosearch|katex|math|langlink|outofdate|dirs"
)
_CLASS_MATTERS = frozenset(words("div a ul span table aside p"))
_BLOCK_TAGS = frozenset(
    words("p h1 h2 h3 h4 h5 h6 li pre dt dd td th tr table div ul ol dl section blockquote article main body")
)
_KIND_TAGS = frozenset(words("h1 h2 h3 h4 h5 h6 li dt dd"))
_LONGEST_CODE = 1200


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of text and its tag (`p`, `h1`, `li`, `pre`, ...)."""

    kind: str
    text: str


def main_element(root: Any) -> Any | None:
    """Return the element with the page's own text, without navigation."""
    return next((found[0] for path in _MAIN if (found := root.xpath(path))), None)


def _is_navigation(node: Any) -> bool:
    if not isinstance(node.tag, str) or node.tag in _SKIP_TAGS or node.get("id") in _SKIP_IDS:
        return True
    return node.tag in _CLASS_MATTERS and bool(_SKIP_CLASS.search(node.get("class") or ""))


class _Reader:
    """Walks a tree and cuts a block wherever a block-level tag opens or closes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._buffer: list[str] = []

    def _flush(self, kind: str) -> None:
        text = tidy("".join(self._buffer))
        self._buffer.clear()
        if text:
            self.blocks.append(Block(kind, text))

    def _code(self, node: Any) -> None:
        text = node.text_content().replace("\xa0", " ").rstrip().lstrip("\n")
        if text.strip() and len(text) < _LONGEST_CODE:
            self.blocks.append(Block("pre", text))

    def walk(self, node: Any, kind: str = "p") -> None:
        if _is_navigation(node):
            return
        if node.tag == "pre":
            self._flush(kind)
            self._code(node)
            return
        inner = node.tag if node.tag in _KIND_TAGS else kind
        if node.tag in _BLOCK_TAGS:
            self._flush(kind)
        self._buffer.append(node.text or "")
        for child in node:
            self.walk(child, inner)
            self._buffer.append(child.tail or "")
        if node.tag in _BLOCK_TAGS:
            self._flush(inner)


def read_blocks(main: Any) -> list[Block]:
    reader = _Reader()
    reader.walk(main)
    return reader.blocks


def _lines(blocks: list[Block]) -> Iterator[str]:
    for block in blocks:
        if block.kind == "pre":
            yield f"```\n{block.text}\n```"
        elif is_plain_english(block.text):
            yield {"h1": "# ", "h2": "## ", "h3": "## ", "li": "- "}.get(block.kind, "") + block.text


def as_text(blocks: list[Block]) -> str:
    """Format a page as light Markdown."""
    return "\n".join(_lines(blocks))


def paragraphs(blocks: list[Block]) -> list[str]:
    """Return the paragraphs that are long enough to ask about."""
    return [
        block.text
        for block in blocks
        if block.kind in {"p", "dd", "li"} and is_plain_english(block.text) and 150 < len(block.text) < 900
    ]
