"""Encodes dashboards as Grafana's JSON (schema version 39, which Grafana 11 and later accept)."""

from collections.abc import Iterable, Iterator
from typing import Any

from deploy.dashboards.panels import Dashboard, Draw, Panel, Row, Variable

SCHEMA_VERSION = 39
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_HEIGHT = {Draw.NUMBER: 4, Draw.NAMES: 4}
_DEFAULT_HEIGHT = 8
_TAG = "sluice"

Json = dict[str, Any]


def dashboard_json(dashboard: Dashboard) -> Json:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [_TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_alerts()]},
        "links": [_link_to_others()],
        "templating": {"list": [_datasource(), *(_variable(each) for each in dashboard.variables)]},
        "panels": list(_place_panels(dashboard.rows)),
    }


def _place_panels(rows: Iterable[Row]) -> Iterator[Json]:
    """Yield headings and panels with their positions: row by row, panels from the left until a line is full."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield _heading(row, number, y)
        y += 1
        x = line_height = 0
        for panel in row.panels:
            height = _HEIGHT.get(panel.draw, _DEFAULT_HEIGHT)
            if x + panel.width > _COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": height})
            x, line_height = x + panel.width, max(line_height, height)
        y += line_height


def _heading(row: Row, number: int, y: int) -> Json:
    place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, place: Json) -> Json:
    kind, options = _panel_type(panel)
    return {
        "id": number,
        "type": kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "targets": [_target(panel, index) for index in range(len(panel.queries))],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": options,
    }


def _panel_type(panel: Panel) -> tuple[str, Json]:
    """Return Grafana's panel type, and the options of that type."""
    match panel.draw:
        case Draw.NUMBER:
            reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return "stat", {"reduceOptions": reduced, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
        case Draw.NAMES:
            reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return "stat", {"reduceOptions": reduced, "colorMode": "none", "graphMode": "none", "textMode": "name"}
        case Draw.HEATMAP:
            color = {"mode": "scheme", "scheme": "Spectral", "steps": 64, "reverse": True, "exponent": 0.5, "fill": ""}
            axis = {"unit": panel.unit.value, "axisPlacement": "left"}
            return "heatmap", {"calculate": False, "color": color, "yAxis": axis, "cellGap": 1}
        case Draw.LINES | Draw.STACKED:
            legend = {
                "showLegend": True,
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["mean", "lastNotNull"],
            }
            return "timeseries", {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _target(panel: Panel, index: int) -> Json:
    query = panel.queries[index]
    target = {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.promql,
        "legendFormat": query.legend,
        "editorMode": "code",
        "range": True,
    }
    return {**target, "format": "heatmap"} if panel.draw is Draw.HEATMAP else target


def _field(panel: Panel) -> Json:
    field: Json = {"unit": panel.unit.value, "thresholds": _thresholds(panel)}
    if panel.draw is not Draw.HEATMAP:
        field["min"] = 0
    if panel.max is not None:
        field["max"] = panel.max
    if panel.decimals is not None:
        field["decimals"] = panel.decimals
    if panel.words:
        words = {
            value: {"text": text, "color": color, "index": at} for at, (value, text, color) in enumerate(panel.words)
        }
        field["mappings"] = [{"type": "value", "options": words}]
    if panel.draw in (Draw.LINES, Draw.STACKED):
        field["custom"] = _curve(panel)
    return field


def _thresholds(panel: Panel) -> Json:
    first: list[Json] = [{"value": None, "color": "green"}]
    return {"mode": "absolute", "steps": first + [{"value": t.value, "color": t.color} for t in panel.thresholds]}


def _curve(panel: Panel) -> Json:
    is_stacked = panel.draw is Draw.STACKED
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if is_stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if is_stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
    }


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _alerts() -> Json:
    """Return the annotation that shows firing alerts on every graph."""
    return {
        "name": "Alerts",
        "datasource": _DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertstate="firing", alertname=~"Sluice.*"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{model}}",
        "step": "60s",
    }


def _link_to_others() -> Json:
    return {
        "title": "Sluice's dashboards",
        "type": "dashboards",
        "tags": [_TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }
