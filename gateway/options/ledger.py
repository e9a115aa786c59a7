"""Options of the ledger: what becomes of the use of keys and models."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sluice.gateway.options.option import choice, fraction, integer, option, printable_text, size
from sluice.gateway.options.responses import NONE
from sluice.gateway.options.serving import OFF

HASHES, TEXT, JSON = "hashes", "text", "json"
_POSTGRES = ("postgres", "postgresql")


def parse_ledger_place(text: str) -> str:
    """Parse the path of a file, the URL of a Postgres database, or `none`."""
    allowed = "the path of a file, postgresql://USER@HOST/DATABASE or none"
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError(allowed) from None
    if not text.strip() or not text.isprintable() or ("://" in text and parts.scheme not in _POSTGRES):
        raise ValueError(allowed)
    return text


def re2_pattern(text: str) -> str:
    """Parse a pattern of RE2; its value is the text."""
    from sluice.gateway.tenancy.ledger.logs import Redaction  # few servers need RE2 here

    try:
        Redaction((text,))
    except ValueError as error:
        raise ValueError(f"a pattern ({error})") from None
    return text


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """Ledger: a row for each request that reached a model, with its key, its tokens and its price"""

    place: str | None = option(
        "--ledger",
        None,
        parse_ledger_place,
        "PATH|URL|none",
        "store of the rows: a SQLite file, or a Postgres database (needs sluice[postgres]). kill -9 costs those of "
        "the last second. Default: ledger.sqlite in --state-path, with the requests of those who sent a key; if "
        "given, all requests have a row",
        secret=True,
    )
    retention_days: int = option(
        "--ledger-retention-days",
        90,
        integer(0, 36_500),
        "DAYS",
        "rows older than this are deleted; 0 keeps all. The sums of each day stay for ever",
    )
    price_table: str | None = option(
        "--price-table",
        None,
        printable_text("the path of a file"),
        "FILE",
        "prices of a million tokens, in JSON or YAML: {MODEL: {prompt: 0.5, cached: 0.1, generated: 1.5}}, where "
        "MODEL is a glob of models or of model:adapter, and the first that fits counts. Default: all is free",
    )

    access_log: str = option(
        "--access-log",
        OFF,
        choice(OFF, TEXT, JSON),
        "off|text|json",
        "write a line for each request to standard output: sender, route, status, bytes, times, tokens",
    )
    request_log: str | None = option(
        "--request-log",
        None,
        printable_text("the path of a file"),
        "PATH",
        "write a line of JSON for each request that reached a model, with hashes of its body and of the answer",
    )
    request_log_content: str = option(
        "--request-log-content",
        HASHES,
        choice(HASHES, TEXT),
        "hashes|text",
        "text: write the bodies themselves, too, of up to 256 KiB of JSON. Streamed answers are never written: what "
        "--request-log-redact should find may be spread over their events",
    )
    request_log_redact: tuple[str, ...] = option(
        "--request-log-redact",
        (),
        re2_pattern,
        "REGEX",
        "replace the matches of this pattern (RE2) in the texts of the request log. May be given several times",
        is_many=True,
        separator="\n",
    )
    request_log_sample_rate: float = option(
        "--request-log-sample-rate",
        1.0,
        fraction,
        "RATE",
        "part of the requests that is logged, from 0 to 1, chosen by chance",
    )
    request_log_max_bytes: int = option(
        "--request-log-max-size",
        1 << 30,
        size(1 << 20),
        "SIZE",
        "most bytes of the request log, in all its files together: a full file is renamed, and the oldest are deleted",
    )
    request_log_max_days: int = option(
        "--request-log-max-age-days", 30, integer(1, 36_500), "DAYS", "days for which its files are kept"
    )

    def store_place(self, state_folder: Path) -> str | None:
        """Return the file or URL of the ledger; None where there is none."""
        if self.place is None:
            return str(state_folder / "ledger.sqlite")
        return None if self.place == NONE else self.place
