import { useCallback, useEffect, useState } from "preact/hooks";
import { fetchJson, type Options } from "./client";

export interface Fetched<T> {
  value: T | null;
  /** Why there is no newer value; "" where all went well. */
  error: string;
  reload: () => void;
}

/** Fetches JSON when a component is first shown, and again with `reload`. */
export function useFetched<T>(path: string, options: Options = {}): Fetched<T> {
  const [value, setValue] = useState<T | null>(null);
  const [error, setError] = useState("");
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    fetchJson<T>(path, { ...options, signal: abort.signal }).then(
      (found) => {
        setValue(found);
        setError("");
      },
      (problem: Error) => abort.signal.aborted || setError(problem.message),
    );
    return () => abort.abort();
  }, [path, turn]);
  return { value, error, reload: useCallback(() => setTurn((n) => n + 1), []) };
}
