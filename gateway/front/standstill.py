"""Whether something has come that the event loop has not read yet.

When a process goes on after it stood still (SIGSTOP, a paused machine), timers may run before what came meanwhile is
read: the wait for events was interrupted and is over. Who closes a silent connection looks here first, or its client
loses a request that nobody saw.
"""

import select
from asyncio import BaseTransport

UNREAD_LOOK_S = 0.02
"""When to look again at a connection that shall close but has something to read."""


def has_unread(transport: BaseTransport) -> bool:
    """Return whether the peer has sent something, or has left, and the transport has not read it. One that is closing
    reads no more."""
    if transport.is_closing():
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))
