import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { numRecorded, seriesOf, type SeriesName } from "../live/history";
import { clock } from "./format";
import { color, isDark } from "./theme";

export interface Line {
  name: SeriesName;
  label: string;
  /** The CSS property of its colour, such as "series-1". */
  color: string;
  isFilled?: boolean;
}

export interface ChartProps {
  /** What is shown, for screen readers. */
  label: string;
  lines: Line[];
  format: (value: number | null | undefined) => string;
  height?: number;
}

const LONGEST_S = 300;
const SHORTEST_S = 60;

/** Time series of what was seen. The legend has the values under the pointer, else the last ones. */
export function Chart({ label, lines, format, height = 190 }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [at, setAt] = useState<number | null>(null);
  const dark = isDark();
  const seen = numRecorded.value;
  useEffect(() => {
    const place = box.current as HTMLDivElement;
    plot.current = makePlot(place, lines, format, height, setAt);
    const watch = new ResizeObserver(() => plot.current?.setSize({ width: place.clientWidth, height }));
    watch.observe(place);
    return () => {
      watch.disconnect();
      plot.current?.destroy();
    };
  }, [dark, height]);
  useEffect(() => plot.current?.setData(dataOf(lines)), [seen, dark]);
  const values = seriesOf(...lines.map((each) => each.name)).slice(1);
  const shown = values.map((column) => format(at === null ? column.at(-1) : column[at]));
  return (
    <div class="chart">
      <div class="legend">
        {lines.map((each, n) => (
          <span key={each.name}>
            <i style={{ background: `var(--${each.color})` }} /> {each.label} <b>{shown[n]}</b>
          </span>
        ))}
      </div>
      <div
        ref={box}
        class="chart-box"
        style={{ height: `${height}px` }}
        role="img"
        aria-label={`${label}: ${lines.map((each, n) => `${each.label} ${format(values[n]?.at(-1))}`).join(", ")}`}
      />
    </div>
  );
}

function dataOf(lines: Line[]): uPlot.AlignedData {
  return seriesOf(...lines.map((each) => each.name)) as unknown as uPlot.AlignedData;
}

function makePlot(
  place: HTMLElement,
  lines: Line[],
  format: ChartProps["format"],
  height: number,
  onPoint: (at: number | null) => void,
): uPlot {
  const axis = {
    stroke: color("text-soft"),
    grid: { stroke: color("line"), width: 1 },
    ticks: { show: false },
    font: `12px ${getComputedStyle(document.body).fontFamily}`,
  };
  const options: uPlot.Options = {
    width: place.clientWidth,
    height,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
    padding: [10, 26, 0, 0],
    scales: { x: { range: chooseWindow }, y: { range: (_, _low, high) => [0, Math.max(high * 1.12, 1)] } },
    axes: [
      { ...axis, space: 76, size: 26, values: (_, all) => all.map(clock) },
      { ...axis, size: 62, space: 34, values: (_, all) => all.map(format) },
    ],
    series: [{}, ...lines.map(makeLine)],
    hooks: { setCursor: [(each) => onPoint(each.cursor.idx ?? null)] },
  };
  return new uPlot(options, dataOf(lines), place);
}

function makeLine(line: Line): uPlot.Series {
  const stroke = color(line.color);
  return { stroke, width: 1.8, fill: line.isFilled ? stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.13)") : undefined, points: { show: false } };
}

/** Returns what of the time is shown: all that was seen, but neither a moment nor an hour. */
function chooseWindow(_: uPlot, first: number, last: number): [number, number] {
  return [Math.max(last - LONGEST_S, Math.min(first, last - SHORTEST_S)), last];
}
