"""A Triton model server without protocols."""

import os

# gRPC reads this when it is imported, which the configuration's protobuf classes do, so it must be set before any of
# them. With gRPC's fork handlers, most workers of Python models that start while a call is served die at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251 - a library's switch, not an option of ours
