"""What the inside of a Markdown block is without what its rendered form does not show.

Every pattern takes time linear in the block: none may look far ahead from each of many places.
"""

import re
from collections.abc import Mapping

_COMMENT = r"<!--(?:[^-<]|-(?!->)|<(?!!--))*+-->"
"""One that holds no beginning of another."""
_TAGS = (
    "a|abbr|address|article|aside|b|big|blockquote|body|br|button|caption|center|cite|code|col|colgroup|dd|del|details|"
    "dfn|div|dl|dt|em|figcaption|figure|font|footer|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|kbd|label|li|"
    "link|main|mark|meta|nav|ol|p|picture|pre|q|s|samp|script|section|small|source|span|strike|strong|style|sub|summary|"
    "sup|svg|table|tbody|td|tfoot|th|thead|time|tr|tt|u|ul|var|video|wbr"
)
_TAG = rf"</?(?:{_TAGS})(?=[\s/>])[^<>]*+>"
"""HTML's own alone: `<model>` in prose is a placeholder that its author forgot to quote."""
_CODE = r"(?P<ticks>`++)[^`].*?(?<!`)(?P=ticks)(?!`)"
_LABEL = r"\[(?P<text>(?:[^\[\]\\]|\\.)*+)\]"
_DESTINATION = r"(?:<[^<>\n]*+>|[^\s()<>]*+(?:\([^\s()]*+\)[^\s()]*+)*+)"
_LINK_TITLE = r"""(?:\s++(?:"[^"]*+"|'[^']*+'|\([^()]*+\)))?"""
_LINK = rf"!?{_LABEL}(?:\(\s*+{_DESTINATION}{_LINK_TITLE}\s*+\)|\[(?P<reference>[^\[\]]*+)\])"
_UNSEEN = re.compile(
    rf"\\.|{_CODE}|(?P<comment>{_COMMENT})|(?P<tag>{_TAG})|(?P<link>{_LINK})",
    re.DOTALL | re.IGNORECASE,
)
_MAY_HOLD_UNSEEN = re.compile(r"\](?:\(|\[)|<[a-z/!]", re.IGNORECASE)
_HTML = re.compile(
    rf"<!--.*?(?:-->|\Z)|<(?P<name>script|style)(?=[\s>]).*?(?:</(?P=name)\s*>|\Z)|<[!?][^<>]*+>|{_TAG}",
    re.DOTALL | re.IGNORECASE,
)


def prose(block: str, references: Mapping[str, object]) -> str:
    """A paragraph, heading or table row: links and images become their text, comments and tags nothing.

    `references` are the document's, by label in upper case. Code spans stay as they are.
    """
    if not _MAY_HOLD_UNSEEN.search(block):
        return block

    def shown(match: re.Match[str]) -> str:
        if match["comment"] or match["tag"]:
            return ""
        if match["link"] is None or not _is_link(match, references):
            return match[0]
        return match["text"]

    # Twice, for an image inside of a link.
    return _UNSEEN.sub(shown, _UNSEEN.sub(shown, block))


def html(block: str) -> str:
    """A block of HTML: without its tags, comments, scripts and styles."""
    return _HTML.sub("", block)


def _is_link(match: re.Match[str], references: Mapping[str, object]) -> bool:
    if match["reference"] is None:
        return True
    label = match["reference"] or match["text"]
    return " ".join(label.split()).upper() in references
