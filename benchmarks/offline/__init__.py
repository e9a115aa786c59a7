"""Offline throughput and single-stream latency of Sluice's engine beside vLLM's CPU build and OpenVINO GenAI.

This file imports nothing: the workers run in the peers' environments, which hold the peer and nothing of Sluice.
"""
