"""Settings of a gateway's process, be it the only one or one of several."""

import resource
import sys

_SWITCH_INTERVAL_S = 0.001
"""How long a thread may keep the interpreter's lock while others wait: the event loop waits so for each long work."""


def raise_file_limit() -> None:
    """Raise the limit of open files: each connection is one, and the usual limit of 1024 is a login shell's."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def favour_event_loop() -> None:
    """Let threads give the interpreter's lock up soon."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
