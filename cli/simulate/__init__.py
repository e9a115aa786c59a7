"""`sluice simulate`: a fleet that serves a trace in simulated time, and its report."""
