// What pages are made of: their head, panels, figures, labels, and what stands where there is nothing.
import type { ComponentChildren } from "preact";
import { Icon, type IconName } from "./icon";
import type { Tone } from "./toast";

export interface HeadProps {
  title: string;
  lead?: ComponentChildren;
  children?: ComponentChildren;
}

/** The head of a page, with what can be done at its right. */
export function Head({ title, lead, children }: HeadProps) {
  return (
    <header class="page-head">
      <div>
        <h1 tabIndex={-1}>{title}</h1>
        {lead && <p>{lead}</p>}
      </div>
      {children && <div class="row">{children}</div>}
    </header>
  );
}

export interface PanelProps {
  title?: ComponentChildren;
  actions?: ComponentChildren;
  class?: string;
  children?: ComponentChildren;
}

/** A framed part of a page. */
export function Panel({ title, actions, children, class: more = "" }: PanelProps) {
  return (
    <section class={`panel ${more}`}>
      {(title || actions) && (
        <div class="panel-head">
          {title && <h2>{title}</h2>}
          {actions && <div class="row">{actions}</div>}
        </div>
      )}
      {children}
    </section>
  );
}

export interface FigureProps {
  label: string;
  value: ComponentChildren;
  unit?: string;
  note?: ComponentChildren;
  children?: ComponentChildren;
}

/** A number that is read at a glance. */
export function Figure({ label, value, unit, note, children }: FigureProps) {
  return (
    <div class="figure">
      <div class="figure-label">{label}</div>
      <div class="figure-value">
        {value}
        {unit && <span class="figure-unit">{unit}</span>}
      </div>
      {note && <div class="figure-note">{note}</div>}
      {children}
    </div>
  );
}

/** A word that says a state. */
export function Badge({ tone = "info", children }: { tone?: Tone | "plain"; children: ComponentChildren }) {
  return <span class={`badge tone-${tone}`}>{children}</span>;
}

/** A line that stands out. */
export function Notice({ tone = "info", children }: { tone?: Tone; children: ComponentChildren }) {
  const icons = { info: "info", good: "check", warning: "warning", error: "error" } as const;
  return (
    <div class={`notice tone-${tone}`} role={tone === "error" ? "alert" : undefined}>
      <Icon name={icons[tone]} />
      <div>{children}</div>
    </div>
  );
}

export interface EmptyProps {
  icon: IconName;
  title: string;
  children?: ComponentChildren;
}

/** Stands where there is nothing to show, and says what would be here. */
export function Empty({ icon, title, children }: EmptyProps) {
  return (
    <div class="empty">
      <Icon name={icon} size={30} />
      <p class="empty-title">{title}</p>
      {children && <div>{children}</div>}
    </div>
  );
}

/** How much of something is used, from 0 to 1, as a bar. */
export function Meter({ label, share, tone }: { label: string; share: number; tone?: Tone }) {
  const percent = Math.max(0, Math.min(100, share * 100));
  return (
    <div
      class={`meter tone-${tone ?? "info"}`}
      role="progressbar"
      aria-label={label}
      aria-valuenow={Math.round(percent)}
      aria-valuemin={0}
      aria-valuemax={100}
    >
      <span style={{ width: `${percent}%` }} />
    </div>
  );
}
