"""HTTP workers: gateway processes that share the ports of one host process, which has the engines and all state."""
