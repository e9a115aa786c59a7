"""`make gpu-kit`: what a machine with PyTorch and a GPU, but no network, lacks to run `python -m benchmarks.gpu`.

The kit is a source tree without its large files, and in its folder `wheels` the packages that Sluice needs and the
machine lacks, for CPython 3.12 on Linux.
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PRESENT = Path(__file__).with_name("present.txt")
PYTHON = "3.12"
LIMIT_BYTES = 50 << 20
LARGEST_FILE_BYTES = 1_000_000
"""Larger files of the source tree are left out: weights of the bundled models, recorded traffic."""
WITHOUT = {"openvino"}
"""The torch runtime serves without it."""
MACHINE = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
}
PLATFORMS = ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
PLATFORMS += [f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)]
Read = Callable[[str], tuple[str, Iterable[str]]]
"""Returns the version of an installed package, and its requirements."""


class KitError(Exception):
    """A kit that cannot be made. The message says why."""


def read_present(text: str) -> dict[str, str | None]:
    """Parse lines as `pip freeze` writes them: the versions of packages by name, None where a line has none."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") or None for each in requirements}


def missing(requirements: Iterable[str], present: Mapping[str, str | None], read: Read) -> dict[str, str]:
    """Return the versions, by name, of the packages that a machine with those of `present` lacks for `requirements`.

    What a present package needs is taken to be there, unless its version is not one that is needed.
    """
    found: dict[str, str] = {}
    waiting = [*_applicable(requirements, set())]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in WITHOUT or _fits(requirement, present.get(name, "")):
            continue
        version, needs = read(name)
        if name not in found or requirement.extras:
            waiting += _applicable(needs, requirement.extras)
        found[name] = version
    return dict(sorted(found.items()))


def _applicable(requirements: Iterable[str], extras: set[str]) -> Iterator[Requirement]:
    """Yield those of the requirements that hold on the machine, with these extras."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**MACHINE, "extra": extra}) for extra in ("", *extras)):
            yield requirement


def _fits(requirement: Requirement, version: str | None) -> bool:
    """Return whether a present package is what is needed. `version` is "" where it is missing, None where unknown."""
    return version is None or (version != "" and requirement.specifier.contains(version, prereleases=True))


def read_installed(name: str) -> tuple[str, Iterable[str]]:
    """Read a package of this environment."""
    found = distribution(name)
    return found.version, found.requires or ()


def copy_source(folder: Path) -> list[str]:
    """Copy the files that are not large, and the installed package's entry points. Returns what is left out."""
    left_out = []
    for name in _source_files():
        source, target = ROOT / name, folder / name
        if source.lstat().st_size > LARGEST_FILE_BYTES:
            left_out.append(name)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    _write_entry_points(folder)
    return left_out


def _source_files() -> Iterator[str]:
    """Yield the files that git tracks, or would."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return (name for name in listed.split("\0") if name and (ROOT / name).exists())


def _write_entry_points(folder: Path) -> None:
    """Write what an installation would have of Sluice's metadata, so that commands and backends are found by name."""
    installed = distribution("sluice")
    metadata = folder / f"sluice-{installed.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (metadata / name).write_text(installed.read_text(name) or "")


def download(versions: Mapping[str, str], folder: Path) -> None:
    """Download the wheels of these versions, each alone: together they are all that is missing."""
    platforms = [f"--platform={each}" for each in PLATFORMS]
    target = [f"--python-version={PYTHON}", "--implementation=cp", "--only-binary=:all:", "--no-deps", *platforms]
    pins = [f"{name}=={version}" for name, version in versions.items()]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *target, f"--dest={folder}", *pins], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KitError(f"pip could not download the wheels: {done.stderr.strip()[-500:]}")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_size(source: int, wheels: int) -> str:
    """Return the sizes as a sentence. Raises KitError for a kit that is too large."""
    total = f"{(source + wheels) / 2**20:.1f} MiB"
    text = f"{total}: {source / 2**20:.1f} of source, {wheels / 2**20:.1f} of wheels"
    if source + wheels > LIMIT_BYTES:
        raise KitError(f"the kit is larger than {LIMIT_BYTES >> 20} MiB: {text}")
    return text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.kit", description=__doc__)
    parser.add_argument("--present", type=Path, default=PRESENT, metavar="FILE", help="the machine's `pip freeze`")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-kit", metavar="FOLDER")
    arguments = parser.parse_args(argv)
    shutil.rmtree(arguments.out, ignore_errors=True)
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    versions = missing(requirements, read_present(arguments.present.read_text()), read_installed)
    try:
        left_out = copy_source(arguments.out)
        source = size_of(arguments.out)
        download(versions, arguments.out / "wheels")
        sizes = check_size(source, size_of(arguments.out / "wheels"))
    except KitError as error:
        sys.stderr.write(f"gpu-kit: {error}\n")
        return 1
    print(f"{len(versions)} wheels; left out: {', '.join(left_out)}")
    print(f"{arguments.out}: {sizes}. There: python3 -m benchmarks.gpu")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
