// An answer in pieces, each with the sources that it rests on.

export interface Source {
  id: number;
  document: string;
  title?: string;
  heading?: string;
  start: number;
  end: number;
  score: number;
  similarity?: number | null;
  text: string;
}

/** Says that the characters from `start` to `end` of the answer rest on a source. They count code points. */
export interface Citation {
  source: number;
  start: number;
  end: number;
  by: "marker" | "overlap";
}

export interface Piece {
  text: string;
  sources: number[];
}

/** Splits an answer where citations begin and end. */
export function splitAnswer(answer: string, citations: Citation[]): Piece[] {
  const characters = Array.from(answer);
  const edges = new Set([0, characters.length, ...citations.flatMap(({ start, end }) => [start, end])]);
  const sorted = [...edges].filter((each) => each <= characters.length).sort((a, b) => a - b);
  return sorted.slice(1).map((end, n) => {
    const start = sorted[n] ?? 0;
    const cited = citations.filter((each) => each.start <= start && end <= each.end);
    return { text: characters.slice(start, end).join(""), sources: [...new Set(cited.map((each) => each.source))].sort() };
  });
}

/** Splits a document's text into what stands before a chunk, the chunk, and what stands behind it. */
export function splitDocument(text: string, start: number, end: number): [string, string, string] {
  const characters = Array.from(text);
  const part = (from: number, to?: number) => characters.slice(from, to).join("");
  return [part(0, start), part(start, end), part(end)];
}
