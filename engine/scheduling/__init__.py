"""Scheduling: admission, the waiting queue, capacity policies and the plan of each step."""
