"""From bytes to an extract, by format."""

from pipelines.rag.documents.extract import Extract
from sluice.errors import invalid


def read(format: str, content: bytes, max_chars: int) -> Extract:
    """`format` is a `DocumentFormat`'s value. Blocks, in a thread or a process of its own; raises SluiceError.

    Each parser is imported where it is needed: a process that lives for one document pays for its own alone.
    """
    match format:
        case "text":
            from pipelines.rag.documents.text import read as read_text

            extract = read_text(content)
        case "markdown":
            from pipelines.rag.documents.markdown import read as read_markdown

            extract = read_markdown(content)
        case "html":
            from pipelines.rag.documents.html import read as read_html

            extract = read_html(content)
        case "pdf":
            from pipelines.rag.documents.pdf import read as read_pdf

            extract = read_pdf(content, max_chars)
        case _:
            raise AssertionError(f"no reader for {format!r}")
    if not extract.text or extract.text.isspace():
        raise invalid("content", f"the {format} document has no text")
    return extract
