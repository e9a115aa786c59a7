import { milliseconds } from "../../ui/format";
import { describe, lastMoment, type Span, type Timeline } from "./timeline";

/** Spans whose bars have a colour of their own. The others have the third. */
const SERIES: Record<string, string> = { prefill: "prefill", prefill_chunk: "prefill", decode: "decode", queue: "wait", paused: "wait" };

/** A bar for each span of a request, below the one that it is a part of, from its start to its end. */
export function Waterfall({ timeline }: { timeline: Timeline }) {
  const whole = lastMoment(timeline);
  return (
    <ol class="waterfall" aria-label={`Spans of request ${timeline.id}`}>
      {timeline.spans.map((span) => (
        <Bar key={span.index} span={span} whole={whole} />
      ))}
    </ol>
  );
}

function Bar({ span, whole }: { span: Span; whole: number }) {
  const end = span.end_ms ?? whole;
  const length = end - span.start_ms;
  const place = { left: `${(span.start_ms / whole) * 100}%`, width: `${Math.max(0.15, (length / whole) * 100)}%` };
  const series = span.depth === 0 ? "whole" : (SERIES[span.name] ?? "other");
  return (
    <li title={describe(span)}>
      <span class="span-name" style={{ paddingLeft: `${span.depth * 0.9}rem` }}>
        {span.name}
        {span.error && <span class="span-error"> {span.error}</span>}
      </span>
      <span class="span-track" aria-hidden="true">
        <span class={`span-bar span-${span.error ? "failed" : series}`} style={place} />
        {span.events.map((event) => (
          <span class="span-event" style={{ left: `${(event.at_ms / whole) * 100}%` }} title={`${event.name}: ${milliseconds(event.at_ms)}`} />
        ))}
      </span>
      <span class="span-time">
        {span.end_ms == null ? "goes on" : milliseconds(length)}
        <span class="hidden"> from {milliseconds(span.start_ms)}</span>
      </span>
    </li>
  );
}
