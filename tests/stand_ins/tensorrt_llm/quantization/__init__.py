from .mode import QuantAlgo

__all__ = ["QuantAlgo"]
