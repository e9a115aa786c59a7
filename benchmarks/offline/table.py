"""The comparison as a Markdown table, as docs/performance.md holds it."""

from collections.abc import Sequence

from benchmarks.figures import Figure


def markdown(figures: Sequence[Figure]) -> str:
    """A row for each quantity, a column for each engine and ratio; medians, with the target where there is one."""
    columns = list(dict.fromkeys(figure.subject for figure in figures))
    cells = {(figure.name, figure.subject): _cell(figure) for figure in figures}
    rows = list(dict.fromkeys((figure.name, _unit(figures, figure.name)) for figure in figures))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, unit in rows:
        values = " | ".join(cells.get((name, column), "") for column in columns)
        lines.append(f"| {name}, {unit} | {values} |")
    return "\n".join(lines)


def _unit(figures: Sequence[Figure], name: str) -> str:
    return next(figure.unit for figure in figures if figure.name == name)


def _cell(figure: Figure) -> str:
    value = f"{figure.median:,.0f}" if figure.median >= 1000 else f"{figure.median:.3g}"
    if figure.target is None:
        return value
    return f"{value} ({figure.target}{'' if figure.target.is_met_by(figure.median) else ', missed'})"
