"""Tokens: what language models are asked, how fast they answer, and what bounds them."""

from deploy.dashboards.engine_rows import ENGINE, KV, QUEUE, STEPS
from deploy.dashboards.panels import Dashboard, Variable
from deploy.dashboards.token_rows import LATENCY, NOW, THROUGHPUT

TOKENS = Dashboard(
    "sluice-tokens",
    "Sluice: tokens",
    "Throughput and latency of language models, and what bounds them.",
    (Variable("instance", 'up{job="sluice"}', "instance"), Variable("model", "sluice_sequences_running", "model")),
    (NOW, THROUGHPUT, LATENCY, QUEUE, KV, STEPS, ENGINE),
)
