// JSON that people type.

export type Parsed<T> = { value: T; error?: undefined } | { value?: undefined; error: string };

/** Parses what was typed into a field. An empty one has the value `empty`. */
export function parseTyped<T>(text: string, empty: T): Parsed<T> {
  if (!text.trim()) return { value: empty };
  try {
    return { value: JSON.parse(text) as T };
  } catch (error) {
    return { error: `This is no JSON: ${(error as Error).message}` };
  }
}

/** Parses an object that was typed. */
export function parseObject(text: string): Parsed<Record<string, unknown>> {
  const parsed = parseTyped<unknown>(text, {});
  if (parsed.error !== undefined) return parsed;
  const isObject = typeof parsed.value === "object" && parsed.value !== null && !Array.isArray(parsed.value);
  return isObject
    ? { value: parsed.value as Record<string, unknown> }
    : { error: 'This must be a JSON object, such as {"name": "value"}.' };
}

/** Returns JSON with line breaks, and a text that is none as it is. */
export function prettyJson(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
