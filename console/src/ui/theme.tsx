import { signal } from "@preact/signals";
import { Button } from "./button";

type Theme = "auto" | "light" | "dark";

const NAME = "sluice.theme";
const ORDER: Theme[] = ["auto", "light", "dark"];
const ICONS = { auto: "screen", light: "sun", dark: "moon" } as const;
const WORDS = { auto: "as the system", light: "light", dark: "dark" } as const;

const theme = signal<Theme>((document.documentElement.dataset.theme as Theme) ?? "auto");
const system = matchMedia("(prefers-color-scheme: dark)");
const isSystemDark = signal(system.matches);
system.addEventListener("change", () => (isSystemDark.value = system.matches));

/** Whether dark colours are shown. What draws on a canvas reads it, and draws again when it changes. */
export function isDark(): boolean {
  return theme.value === "auto" ? isSystemDark.value : theme.value === "dark";
}

const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);

/** Returns a colour of the theme by the name of its CSS property, as rgb(), for a canvas. */
export function color(name: string): string {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function choose(next: Theme): void {
  if (next === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(NAME);
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem(NAME, next);
  }
  theme.value = next;
}

/** A button that goes through the themes. */
export function ThemeButton() {
  const next = ORDER[(ORDER.indexOf(theme.value) + 1) % ORDER.length] ?? "auto";
  const label = `Theme: ${WORDS[theme.value]}. Change to: ${WORDS[next]}`;
  return <Button kind="quiet" icon={ICONS[theme.value]} label={label} onClick={() => choose(next)} />;
}
