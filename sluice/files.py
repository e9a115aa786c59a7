"""Marks and digests of folders: short texts that change with the files in them."""

from hashlib import blake2b
from pathlib import Path


def files_digest(folder: Path) -> str:
    """Return a digest of the contents of the files in `folder`, equal on every machine; "" without any files. Reads
    them, so it takes about a second for each gigabyte."""
    digest, has_files = blake2b(digest_size=16), False
    for file in sorted(each for each in folder.glob("*") if each.is_file()):
        has_files = True
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            while piece := content.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest() if has_files else ""


def files_mark(folder: Path, *, is_flat: bool = False) -> str:
    """Return a mark of the files under `folder`, or in it alone if it `is_flat`, by their paths, sizes and times of
    change; nothing is read.

    Files that were replaced in place change it, and a copy that keeps their times does not. "" without any files.
    """
    try:
        files = sorted(each for each in (folder.glob if is_flat else folder.rglob)("*") if each.is_file())
        facts = [(str(each.relative_to(folder)), (found := each.stat()).st_size, found.st_mtime_ns) for each in files]
    except OSError as error:
        return f"unreadable: {error}"
    return blake2b(repr(facts).encode(), digest_size=8).hexdigest() if facts else ""
