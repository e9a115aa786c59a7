"""One part in this process: `python -m benchmarks.gpu.part NAME`."""

import argparse
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, Notes, Setting, Skipped, add_options


def run_part(name: str, setting: Setting) -> dict[str, Any]:
    """Measure one part here. Returns what its file has: figures, and an error or the reason why it was skipped."""
    if setting.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # noqa: TID251 - the shapes are too small for threads that wait for each other
    notes = Notes(setting.out / f"{name}.json")
    try:
        import_module(f"benchmarks.gpu.{name}").measure(setting, notes)
    except Skipped as reason:
        notes.result["skipped"] = str(reason)
    except Exception as error:  # whatever a part dies of is its result
        traceback.print_exc()
        notes.result["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    notes.result["is_whole"] = "error" not in notes.result
    notes.write()
    return notes.result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.part")
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    add_options(parser)
    arguments = parser.parse_args(argv)
    setting = Setting(arguments.device, arguments.tiny, arguments.out, arguments.work)
    return int("error" in run_part(arguments.name, setting))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
