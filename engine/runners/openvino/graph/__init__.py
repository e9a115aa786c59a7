"""A decoder as an OpenVINO graph: its layers and how they are put together."""
