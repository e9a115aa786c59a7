"""What the command lines of all commands have in common."""

import argparse
import difflib
import sys
from typing import Any, NoReturn

FAILED, USAGE_ERROR = 1, 2
"""Exit codes of commands, beside 0."""


class OneLineParser(argparse.ArgumentParser):
    """One line for an error, not the whole usage, and for an unknown option the one that was perhaps meant."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        known, unknown = super().parse_known_args(*args, **kwargs)
        for word in unknown:
            flag = word.partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.75)
            if flag.startswith("--") and near:
                self.error(f"unknown option {flag}; did you mean {near[0]}?")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message} (see {self.prog} --help)\n")
        sys.exit(USAGE_ERROR)
