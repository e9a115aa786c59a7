"""The documentation packages that rill learns from, and their download.

Every licence was read in the package's own `debian/copyright`. Where a package names a copyleft licence, it covers
files
that are not documentation (packaging scripts, C code). `skip` excludes pages under other terms.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_SPHINX_SKIP = r"_static|_sources|_modules|_images|_downloads|genindex|search|contents|modindex|changelog"


@dataclass(frozen=True, slots=True)
class Source:
    """A Debian package. `weight` is the share of its pages that is used as plain text."""

    name: str
    title: str
    package: str
    root: str
    skip: str
    licence: str
    weight: float

    def folder(self, work: Path) -> Path:
        return work / "ext" / self.package / "usr/share/doc" / self.root


SOURCES = (
    Source("python", "Python", "python3.11-doc", "python3.11/html", _SPHINX_SKIP, "PSF-2.0", 1.0),
    Source(
        "postgres", "PostgreSQL", "postgresql-doc-15", "postgresql-doc-15/html",
        r"bookindex|release-|/index\.html|biblio", "PostgreSQL", 1.0,
    ),
    Source(
        "sqlite", "SQLite", "sqlite3-doc", "sqlite3",
        r"releaselog|syntax|keyword_index|doclist|sitemap|toc\.html|/images|matrix|search"
        r"|changes\.html|vdbe\.html|doc_", "public domain", 0.7,
    ),
    Source(
        "django", "Django", "python-django-doc", "python-django-doc/html",
        _SPHINX_SKIP + "|releases/", "BSD-3-Clause", 1.0,
    ),
    Source(
        "scipy", "SciPy", "python-scipy-doc", "python-scipy-doc/html",
        _SPHINX_SKIP + "|release", "BSD-3-Clause", 0.15,
    ),
    Source(
        "apache", "the Apache HTTP Server", "apache2-doc", "apache2-doc/manual/en",
        r"quickreference|directives\.html|sitemap|license|convenience", "Apache-2.0", 0.5,
    ),
    # The embedded book is CC-BY-SA and is excluded; the other books are MIT or Apache-2.0.
    Source(
        "rust", "Rust", "rust-doc", "rust-doc/html",
        r"print\.html|/src/|/toc|first-edition|second-edition|2018-edition|/std/|/core/|/alloc/|/test/"
        r"|/proc_macro/|error-index|/error_codes|/rustc-std|search|/embedded-book", "MIT OR Apache-2.0", 1.0,
    ),
)  # fmt: skip
TITLES = {source.name: source.title for source in SOURCES}


def fetch(source: Source, work: Path) -> None:
    """Download and unpack one package below `work`, unless it exists there."""
    target = work / "ext" / source.package
    if target.exists():
        return
    debs = work / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", source.package], cwd=debs, check=True)
    [deb] = debs.glob(f"{source.package}_*.deb")
    target.mkdir(parents=True)
    subprocess.run(["dpkg", "-x", deb, target], check=True)
