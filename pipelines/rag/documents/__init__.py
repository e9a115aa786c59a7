"""Detects the format of uploaded documents (text, Markdown, HTML, PDF, JSON lines) and parses them."""
