"""Writes the JSON of the dashboards: `python -m deploy.dashboards`."""

import json
from pathlib import Path

from deploy.dashboards.gpus import GPUS
from deploy.dashboards.layout import dashboard_json
from deploy.dashboards.models import MODELS
from deploy.dashboards.panels import Dashboard
from deploy.dashboards.tokens import TOKENS

DASHBOARDS = (TOKENS, MODELS, GPUS)
FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"


def dashboard_path(dashboard: Dashboard) -> Path:
    return FOLDER / f"{dashboard.uid}.json"


def dashboard_text(dashboard: Dashboard) -> str:
    return json.dumps(dashboard_json(dashboard), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        dashboard_path(each).write_text(dashboard_text(each))
