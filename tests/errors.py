"""The error of a call that must fail."""

from collections.abc import Callable
from typing import Any

import pytest

from sluice.errors import SluiceError


def error_of(call: Callable[..., Any], /, *arguments: Any, **named: Any) -> SluiceError:
    """Return the error that the call raises."""
    with pytest.raises(SluiceError) as caught:
        call(*arguments, **named)
    return caught.value
