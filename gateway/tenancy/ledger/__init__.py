"""The ledger: a row for each request that reached a model, what it cost, and the sums of each day."""
