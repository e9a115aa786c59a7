import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { ApiError } from "../../api/client";
import { Button } from "../../ui/button";
import { toast } from "../../ui/toast";
import { fetchText } from "./api";
import { splitDocument, type Source } from "./citations";

interface Shown {
  source: Source;
  parts: [string, string, string];
}

const shown = signal<Shown | null>(null);

/** Shows a source's document, with the chunk marked. */
export async function openDocument(collection: string, source: Source): Promise<void> {
  try {
    const text = await fetchText(collection, source.document);
    shown.value = { source, parts: splitDocument(text, source.start, source.end) };
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    toast(error.message, "error");
  }
}

/** The dialog of `openDocument`. */
export function DocumentView() {
  const dialog = useRef<HTMLDialogElement>(null);
  const chunk = useRef<HTMLElement>(null);
  const now = shown.value;
  useEffect(() => {
    if (!now) return;
    dialog.current?.showModal();
    chunk.current?.scrollIntoView({ block: "center" });
  }, [now]);
  if (!now) return null;
  const [before, text, after] = now.parts;
  return (
    <dialog class="document" ref={dialog} aria-label={now.source.document} onClose={() => (shown.value = null)}>
      <div class="panel-head">
        <h2>{now.source.title || now.source.document}</h2>
        <Button kind="quiet" icon="close" label="Close" onClick={() => dialog.current?.close()} />
      </div>
      <pre class="document-text" tabIndex={0} aria-label="Text of the document">
        {before}
        <mark ref={chunk}>{text}</mark>
        {after}
      </pre>
    </dialog>
  );
}
