"""Documents as they come: text, Markdown, HTML, PDF."""
