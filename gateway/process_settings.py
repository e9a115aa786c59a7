"""Settings of a gateway's process, be it the only one or one of several."""

import resource
import sys

from sluice.errors import ErrorCode, SluiceError

_MIN_OPEN_FILES = 128
"""Three times what the bundled models take with two workers and no connection."""
_SWITCH_INTERVAL_S = 0.001
"""How long a thread may keep the interpreter's lock while others wait: the event loop waits so for each long work."""


def raise_file_limit() -> None:
    """Raise the limit of open files: each connection is one, and the usual limit of 1024 is a login shell's.

    Raises UNAVAILABLE where not even a server without connections has enough of them.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < _MIN_OPEN_FILES:
        message = (
            f"this process may open {most} files, and needs at least {_MIN_OPEN_FILES}, and one for each connection"
        )
        fix = "raise the hard limit (`ulimit -Hn`, LimitNOFILE= of a systemd unit, --ulimit nofile= of Docker)"
        raise SluiceError(ErrorCode.UNAVAILABLE, f"{message}; {fix}")


def favour_event_loop() -> None:
    """Let threads give the interpreter's lock up soon."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
