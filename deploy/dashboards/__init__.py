"""The Grafana dashboards of deploy/grafana/dashboards, written by `python -m deploy.dashboards`."""
