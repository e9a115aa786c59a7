from . import executor

__all__ = ["executor"]
