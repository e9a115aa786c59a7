"""Records the outcome of each test of any Python that a QA script starts. Python imports this module by its name."""

import sys
import unittest

import numpy as np
from qa_recorder import record


def _watch(outcome: str) -> None:
    method = getattr(unittest.TestResult, f"add{outcome}")

    def add(self: unittest.TestResult, test: unittest.TestCase, *detail: object) -> None:
        method(self, test, *detail)
        error = detail[0] if detail else ""
        record(sys.modules[type(test).__module__].__file__ or "", test.id(), outcome, _describe(error))

    setattr(unittest.TestResult, f"add{outcome}", add)


def _describe(error: object) -> str:
    return f"{error[0].__name__}: {error[1]}" if isinstance(error, tuple) else str(error)


def _record_end(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Record a program that ends before its tests begin, such as by a missing module."""
    if sys.argv and sys.argv[0].endswith(".py"):
        record(sys.argv[0], "program", "Error", f"{kind.__name__}: {error}")
    sys.__excepthook__(kind, error, trace)


np.NINF = -np.inf  # numpy 2 lacks the name, which some tests use
for each in ("Success", "Failure", "Error", "Skip"):
    _watch(each)
sys.excepthook = _record_end
