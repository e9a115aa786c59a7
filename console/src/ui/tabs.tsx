import type { ComponentChildren } from "preact";
import { useId, useRef, useState } from "preact/hooks";

export interface Tab {
  name: string;
  title: ComponentChildren;
  view: () => ComponentChildren;
}

/** Several views in one place. Arrow keys, Home and End move between the tabs. */
export function Tabs({ label, tabs }: { label: string; tabs: Tab[] }) {
  const id = useId();
  const [chosen, choose] = useState(tabs[0]?.name);
  const list = useRef<HTMLDivElement>(null);
  const at = Math.max(0, tabs.findIndex((each) => each.name === chosen));
  const move = (event: KeyboardEvent) => {
    const last = tabs.length - 1;
    const next = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at ? at - 1 : last, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(tabs[next]?.name);
    list.current?.querySelectorAll<HTMLElement>("[role=tab]")[next]?.focus();
  };
  return (
    <div class="tabs">
      <div class="tab-list" role="tablist" aria-label={label} ref={list} onKeyDown={move}>
        {tabs.map((each, n) => (
          <button
            type="button"
            role="tab"
            key={each.name}
            id={`${id}-${each.name}`}
            aria-selected={n === at}
            aria-controls={`${id}-view`}
            tabIndex={n === at ? 0 : -1}
            onClick={() => choose(each.name)}
          >
            {each.title}
          </button>
        ))}
      </div>
      <div role="tabpanel" id={`${id}-view`} aria-labelledby={`${id}-${tabs[at]?.name}`} tabIndex={0}>
        {tabs[at]?.view()}
      </div>
    </div>
  );
}
