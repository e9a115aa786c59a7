"""The record of a call: its events, which exporters read."""
