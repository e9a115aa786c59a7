// The colour of a sequence, the same wherever it is drawn.
import { isDark } from "../ui/theme";

/** Hues from here to here are those of blocks that sequences share. */
const SHARED = [235, 285] as const;

/** Returns the colour of a request's sequences in the present theme. */
export function sequenceColor(requestId: string): string {
  const mixed = hash(requestId);
  const turn = mixed % (360 - SHARED[1] + SHARED[0]);
  const hue = turn < SHARED[0] ? turn : turn + SHARED[1] - SHARED[0];
  const lightness = (isDark() ? 55 : 35) + ((mixed >>> 20) % 3) * 8;
  return `hsl(${hue} 62% ${lightness}%)`;
}

function hash(text: string): number {
  let value = 2166136261;
  for (let n = 0; n < text.length; n++) value = Math.imul(value ^ text.charCodeAt(n), 16777619);
  value = Math.imul(value ^ (value >>> 16), 2246822507);
  return (value ^ (value >>> 13)) >>> 0;
}
