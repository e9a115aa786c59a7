"""The graph of a decoder in OpenVINO: nodes, layers, attention, and their assembly."""
