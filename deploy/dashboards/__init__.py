"""The source of the Grafana dashboards in deploy/grafana/dashboards. `python -m deploy.dashboards` writes them."""
