// Values as source text: of the shell, of Python and of JSON.

/** Returns a text as one word of a POSIX shell. */
export function shellWord(text: string): string {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** Returns a JSON value as a Python expression. What is longer than a line is spread over several, after `indent`. */
export function pythonValue(value: unknown, indent = ""): string {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return pythonText(value);
  if (typeof value === "number") return pythonNumber(value);
  if (typeof value === "bigint") return String(value);
  const items = Array.isArray(value)
    ? value.map((each) => pythonValue(each, `${indent}    `))
    : Object.entries(value).map(([name, each]) => `${pythonText(name)}: ${pythonValue(each, `${indent}    `)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (indent.length + line.length <= LINE && !line.includes("\n")) return line;
  return `${open}\n${items.map((each) => `${indent}    ${each},\n`).join("")}${indent}${close}`;
}

const LINE = 100;

function pythonNumber(value: number): string {
  if (Number.isNaN(value)) return 'float("nan")';
  return Number.isFinite(value) ? String(value) : `float("${value > 0 ? "" : "-"}inf")`;
}

/** JSON's escapes are Python's too, but for those of lone surrogates, which no text should have. */
function pythonText(value: string): string {
  return JSON.stringify(value);
}

/** Returns the arguments of a Python call, one to a line. */
export function pythonArguments(fields: Record<string, unknown>, indent = "    "): string {
  return Object.entries(fields)
    .map(([name, value]) => `${indent}${name}=${pythonValue(value, indent)},\n`)
    .join("");
}

export interface Place {
  /** The server's address without a slash at its end, such as http://localhost:8000. */
  url: string;
  /** Where gRPC is served, such as localhost:8001; "" where it is not. */
  grpc: string;
  isGrpcSecure: boolean;
  /** Whether requests need an API key, which copied code takes from the variable SLUICE_API_KEY. */
  hasKey: boolean;
}

/** Returns a curl command that sends JSON to a path of the server. */
export function curlJson(place: Place, path: string, body: unknown, headers: Record<string, string> = {}): string {
  const all = { "content-type": "application/json", ...headers };
  const text = JSON.stringify(body, null, 1);
  return `curl -N ${shellWord(place.url + path)}${curlHeaders(place, all)} \\\n  -d ${shellWord(text)}`;
}

/** Returns curl's options for headers, with the key where one is needed. */
export function curlHeaders(place: Place, headers: Record<string, string>): string {
  const key = place.hasKey ? ` \\\n  -H "authorization: Bearer $SLUICE_API_KEY"` : "";
  const rest = Object.entries(headers).map(([name, value]) => ` \\\n  -H ${shellWord(`${name}: ${value}`)}`);
  return key + rest.join("");
}

/** Returns the Python expression of a key in the environment. */
export function pythonKey(place: Place): string {
  return place.hasKey ? 'os.environ["SLUICE_API_KEY"]' : '"none"';
}

/** Returns the lines of Python that import modules: those of the library first. */
export function pythonImports(place: Place, standard: string[], others: string[]): string {
  const first = [...standard, ...(place.hasKey ? ["import os"] : [])].sort();
  return [...first, ...(first.length ? [""] : []), ...others.sort(), ""].join("\n");
}

/** Returns the arguments of Python's gRPC client. */
export function grpcClient(place: Place): string {
  return `${pythonValue(place.grpc)}${place.isGrpcSecure ? ", ssl=True" : ""}`;
}

/** Returns the metadata of gRPC calls, or the headers of HTTP ones, as an argument of Python; "" without a key. */
export function pythonHeaders(place: Place): string {
  if (!place.hasKey) return "";
  return `, headers={"authorization": f"Bearer {os.environ['SLUICE_API_KEY']}"}`;
}
