"""A fleet on this machine under mixed traffic and faults, in which every accepted request is accounted for."""

import os

# Before anything imports gRPC: its fork handlers kill one child in many of those that do not call exec at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251 - as in serving/__init__.py
