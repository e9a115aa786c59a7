"""Takes secrets out of texts that are to be logged: API keys, bearer tokens, passwords."""

import re

HIDDEN = "[redacted]"
_SECRETS = (
    # A key of ours keeps its public id, by which `sluice keys list` finds it.
    (re.compile(r"\b(sk-sluice-[0-9a-f]{12}-)[\w-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(sk-|hf_|nvapi-|ghp_|xox[bp]-)(?!sluice-)[\w-]{16,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1\2{HIDDEN}"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s/@]+(?=@)", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"\b((?:api[_-]?key|x-api-key|password|passwd|secret|access[_-]?token|auth[_-]?token)[\"']?\s*[=:]\s*[\"']?)"
            r"[^\s\"',;&)}]{4,}",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
)


def redact(text: str) -> str:
    """Return the text without what looks like a secret."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
