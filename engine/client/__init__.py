"""The asyncio side of an engine: clients, streams and supervision."""
