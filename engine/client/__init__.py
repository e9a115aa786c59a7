"""The async side of the engine: what the gateway holds. Here asyncio and the engine meet."""
