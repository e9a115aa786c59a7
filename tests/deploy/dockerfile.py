"""Parses Dockerfiles into stages of instructions."""

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tests import paths

FOLDER = paths.ROOT / "deploy" / "docker"
DOCKERFILES = (FOLDER / "Dockerfile", FOLDER / "Dockerfile.gpu")


class Instruction(NamedTuple):
    name: str
    text: str


class Stage(NamedTuple):
    """The instructions from one FROM to the next. `image` is the argument of FROM."""

    image: str
    instructions: tuple[Instruction, ...]

    def texts(self, name: str) -> list[str]:
        return [each.text for each in self.instructions if each.name == name]

    def command(self, name: str) -> list[str]:
        """Return the command of ENTRYPOINT or CMD in exec form. A shell form is no JSON and raises ValueError."""
        [text] = self.texts(name)
        command: list[str] = json.loads(text)
        return command

    def healthcheck(self) -> list[str]:
        [text] = self.texts("HEALTHCHECK")
        command: list[str] = json.loads(text.partition("CMD ")[2])
        return command

    def environment(self) -> dict[str, str]:
        pairs = (pair for text in self.texts("ENV") for pair in shlex.split(text))
        return dict(pair.split("=", 1) for pair in pairs)


def stages(path: Path) -> list[Stage]:
    """Return the stages in order. The last one is the image."""
    lines = (line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#"))
    whole = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    instructions = [Instruction(*line.split(None, 1)) for line in whole]
    starts = [index for index, each in enumerate(instructions) if each.name == "FROM"]
    ends = [*starts[1:], len(instructions)]
    return [
        Stage(instructions[start].text.split()[0], tuple(instructions[start + 1 : end]))
        for start, end in zip(starts, ends, strict=True)
    ]
