"""Text and structure read from HTML."""

import pytest

from sluice.pipelines.rag.documents import html
from sluice.pipelines.rag.documents.extract import Extract


def read(body: str, head: str = "") -> Extract:
    return html.read_html(f"<!doctype html><html><head>{head}</head><body>{body}</body></html>".encode())


def at(extract: Extract, places: list[int]) -> list[str]:
    return [extract.text[place:].partition("\n")[0] for place in places]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<p>One\n  two</p><p>three", "One two\n\nthree"),
        ("a<br>b <b>c</b><i>d</i>", "a\nb cd"),
        ("x &amp; y &lt;z&gt;&nbsp;&eacute;", "x & y <z> é"),
        ("<h2>A <em>b</em></h2>text", "## A b\n\ntext"),
        ("<ul><li>one<li><p>two</p><ul><li>sub</ul></ul>", "- one\n\n- two\n\n  - sub"),
        ("<ol><li>one<li>two</ol><ol><li>a</ol>", "1. one\n2. two\n\n1. a"),
        ("<ul><li><li>one</ul>", "- one"),
        ("<dl><dt>term<dd>what it is</dl>", "term\nwhat it is"),
        ("<pre>\n<code>if x:\n    <b>y</b> &lt; 1\n</code></pre>", "```\nif x:\n    y < 1\n```"),
        ("<pre>a ``` b</pre>", "````\na ``` b\n````"),
        ("<pre>  </pre>end", "end"),
        (
            "<table><caption>T<thead><tr><th>a<th><p>b</p><tbody><tr><td>1<br>2<td></table>end",
            "T\na | b\n1 2 |\n\nend",
        ),
        ("<table><tr><td><table><tr><td>x<td>y</table><td><h2>H</h2></table>", "x | y\n\n## H"),
        ("a<script>x</script><style>y</style><noscript>n</noscript><svg><text>s</text></svg>b", "ab"),
        ("<p hidden>no</p><div aria-hidden=true>no</div><a class=headerlink>¶</a>yes", "yes"),
        ("<img src=x alt='a picture'> here", "a picture here"),
        ("<!-- comment -->text<template>t</template>", "text"),
        ("</div></table>broken <b><p>markup", "broken\n\nmarkup"),
    ],
)
def test_elements_become_light_markdown(body: str, text: str) -> None:
    assert read(body).text == text


AROUND = "<nav>menu</nav><header>banner</header><aside>ads</aside>{}<footer>legal</footer>"


@pytest.mark.parametrize(
    ("main", "text"),
    [
        ("<main><nav>crumbs</nav><aside>Note.</aside><p>It.</p></main>", "Note.\n\nIt."),
        ("<div role=main>It.</div>", "It."),
        ("<article><header><h1>H</h1></header>It.</article>", "# H\n\nIt."),
        ("<article>One.</article><article>Two.</article>", "One.\n\nTwo."),
        ("<div>It.</div>", "It."),
        ("<main></main><div>It.</div>", "It."),
    ],
)
def test_the_main_content_is_read_without_what_is_around_it(main: str, text: str) -> None:
    assert read(AROUND.format(main)).text == text


def test_headings_have_levels_and_places() -> None:
    extract = read("<p>intro</p><h1>Top<br>line</h1><section><h3> Deep </h3>text</section><h2></h2>")
    assert [(level, text) for _, level, text in extract.headings] == [(1, "Top line"), (3, "Deep")]
    assert at(extract, [start for start, _, _ in extract.headings]) == ["# Top", "### Deep"]


def test_breaks_are_at_blocks_items_and_rows() -> None:
    extract = read("<p>a</p><ul><li>b<li>c</ul><table><tr><td>d<tr><td>e</table><pre>f\ng</pre>h")
    assert at(extract, extract.breaks) == ["- b", "- c", "d", "e", "```", "h"]


@pytest.mark.parametrize(
    ("body", "title"),
    [("<h1>Own</h1>", "Own"), ("<h2>x</h2>", "Page — Site"), ("<h1>a</h1><h1>b</h1>", "Page — Site")],
)
def test_the_title_is_the_only_h1_or_the_pages(body: str, title: str) -> None:
    assert read(body, head="<title>Page &mdash;\n Site</title>").title == title


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"<meta charset=latin1><p>caf\xe9 \x93q\x94", "café “q”"),
        (b'<meta http-equiv="Content-Type" content="text/html; charset=shift_jis"><p>\x93\xfa', "日"),
        (b"<meta charset=utf-16><p>caf\xc3\xa9", "café"),
        ("<p>café".encode("utf-16"), "café"),
        ("<p>café".encode(), "café"),
    ],
)
def test_the_declared_encoding_is_used(content: bytes, text: str) -> None:
    assert html.read_html(content).text == text


@pytest.mark.parametrize("tag", ["div", "ul><li", "table><tr><td", "blockquote", "b", "pre", "h1"])
def test_deep_nesting_is_read(tag: str) -> None:
    assert read(f"<{tag}>" * 3000 + "deep").text.replace("`", "").strip(" \n#-") == "deep"


@pytest.mark.parametrize("content", [b"", b"<frameset><frame>", b"<script>x</script>", b"<body hidden>"])
def test_a_page_without_text_has_none(content: bytes) -> None:
    assert html.read_html(content).text == ""
