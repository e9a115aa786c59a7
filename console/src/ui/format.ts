// Numbers and times as people read them.

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
/** What stands for a value that is not known. */
export const UNKNOWN = "–";

type Known = number | null | undefined;

/** 1234 is "1,234". */
export function count(value: Known): string {
  return value == null ? UNKNOWN : COUNT.format(value);
}

/** 12345 is "12.3K"; small numbers keep a digit after the point where it says something. */
export function short(value: Known): string {
  if (value == null) return UNKNOWN;
  if (value >= 10_000) return SHORT.format(value);
  return value > 0 && value < 10 ? trim(value.toFixed(1)) : COUNT.format(value);
}

/** 0.256 is "26 %". */
export function percent(share: Known): string {
  return share == null ? UNKNOWN : `${(share * 100).toFixed(share > 0 && share < 0.01 ? 1 : 0)} %`;
}

/** 1234 is "1.23 s", 12.3 is "12 ms". */
export function milliseconds(value: Known): string {
  if (value == null) return UNKNOWN;
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value < 10 ? trim(value.toFixed(1)) : value.toFixed(0)} ms`;
}

/** 3725 is "1 h 2 min". */
export function duration(seconds: Known): string {
  if (seconds == null) return UNKNOWN;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** The time of day of seconds since 1970, as 09:05:07. */
export function clock(seconds: number): string {
  return new Date(seconds * 1000).toTimeString().slice(0, 8);
}

function trim(text: string): string {
  return text.replace(/\.0$/, "");
}
