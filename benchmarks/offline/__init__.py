"""Offline throughput and single-stream latency of Sluice's engine beside vLLM's CPU build and OpenVINO GenAI.

Nothing is imported here: the workers run in the peers' environments, which hold the peer and nothing of ours.
"""
