"""Ends a command that cannot go on: one line on standard error, and an exit code."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from sluice.errors import SluiceError
from sluice.gateway.options.option import FAILED, USAGE_ERROR, OptionError

P = ParamSpec("P")


class CommandError(Exception):
    """Ends the command with exit code `code`. The text is for the user."""

    code = FAILED

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        if code is not None:
            self.code = code


def reports_errors(program: str, *more: type[Exception]) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate the function that runs `program`: it prints errors whose text is for the user, and returns their code.

    Those are CommandError, OptionError (a usage error), SluiceError, and the types in `more`.
    """
    others: tuple[type[Exception], ...] = (SluiceError, *more)

    def decorate(run: Callable[P, int]) -> Callable[P, int]:
        @wraps(run)
        def reporting(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return run(*args, **kwargs)
            except BrokenPipeError:
                raise
            except CommandError as error:
                text, code = str(error), error.code
            except OptionError as error:
                text, code = str(error), USAGE_ERROR
            except others as error:
                text, code = str(error) or type(error).__name__, FAILED
            sys.stderr.write(f"{program}: error: {text}\n")
            return code

        return reporting

    return decorate
