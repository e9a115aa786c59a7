// The timelines of the last requests, as GET /v1/requests and GET /v1/requests/{id}/timeline send them.

export interface Listed {
  id: string;
  model: string;
  is_complete: boolean;
  /** Seconds since 1970. */
  started_at: number;
  duration_ms: number | null;
  time_to_first_token_ms: number | null;
}

export interface SpanEvent {
  name: string;
  at_ms: number;
}

export interface Span {
  index: number;
  depth: number;
  name: string;
  start_ms: number;
  /** Null while it goes on. */
  end_ms: number | null;
  attributes: Record<string, unknown>;
  events: SpanEvent[];
  error: string;
}

export interface Timeline extends Listed {
  trace_id: string;
  /** Sums of the spans by their names. */
  totals_ms: Record<string, number>;
  spans: Span[];
  num_dropped_spans: number;
}

/** Returns the end of a request's last span: what the width of a drawing stands for. */
export function lastMoment(timeline: Timeline): number {
  const moments = timeline.spans.flatMap((each) => [each.end_ms ?? each.start_ms, ...each.events.map((e) => e.at_ms)]);
  return Math.max(timeline.duration_ms ?? 0, ...moments, 0.001);
}

/** Returns the attributes of a span as text, without those that the list says already. */
export function describe(span: Span): string {
  return Object.entries(span.attributes)
    .map(([name, value]) => `${name}: ${Array.isArray(value) ? value.join(", ") : String(value)}`)
    .join("\n");
}
