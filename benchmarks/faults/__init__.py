"""The same faults against Sluice and against each peer that can be had here, asked by the same client.

A fault is a module with its `LIMITS` and one `measure(server)`, a server is an `Adapter`. A server takes one fault
after the other while it serves. What happened is written into the folder `faults`, one file for each pair, so that
`--only` repeats a part; `faults.md` has the tables of all.
"""

from benchmarks.faults.run import measure

__all__ = ["measure"]
