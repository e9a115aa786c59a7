import { FileButton } from "../../playground/file_button";
import { readDataUrl } from "../../playground/image";
import { Button } from "../../ui/button";
import { Field } from "../../ui/field";
import { toast } from "../../ui/toast";
import { asked, canAll, draft, images, isBusy, lanes, send } from "./state";

/** Where the next message is written. Enter sends it, Shift and Enter begin a line. */
export function Composer() {
  const hasFaults = Object.keys(asked.value.faults).length > 0;
  const canSend = !isBusy.value && !hasFaults && Boolean(draft.value.trim() || images.value.length);
  const keys = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (canSend) send();
  };
  return (
    <form class="composer" onSubmit={(event) => event.preventDefault()}>
      <Images />
      <Field label="Message" hint="Enter sends; Shift + Enter begins a line." error={hasFaults ? "A setting cannot be sent." : undefined}>
        <textarea
          rows={3}
          value={draft.value}
          onInput={(event) => (draft.value = event.currentTarget.value)}
          onKeyDown={keys}
          onPaste={(event) => void takeImages([...(event.clipboardData?.files ?? [])])}
        />
      </Field>
      <div class="row">
        {canAll("hasImages") && (
          <FileButton label="Image" icon="image" accept="image/*" isMultiple onFiles={(files) => void takeImages(files)} />
        )}
        {isBusy.value ? (
          <Button kind="danger" icon="stop" onClick={() => lanes.value.forEach((each) => each.stop())}>
            Stop
          </Button>
        ) : (
          <Button kind="primary" icon="play" disabled={!canSend} onClick={send}>
            Send
          </Button>
        )}
      </div>
    </form>
  );
}

function Images() {
  if (!images.value.length) return null;
  return (
    <ul class="thumbs" aria-label="Images of the message">
      {images.value.map((url, n) => (
        <li key={url}>
          <img src={url} alt={`Image ${n + 1}`} />
          <Button
            kind="quiet"
            icon="close"
            isSmall
            label={`Remove image ${n + 1}`}
            onClick={() => (images.value = images.value.filter((each) => each !== url))}
          />
        </li>
      ))}
    </ul>
  );
}

async function takeImages(files: File[]): Promise<void> {
  if (!files.length) return;
  if (!canAll("hasImages")) {
    toast("The model takes no images.", "warning");
    return;
  }
  try {
    images.value = [...new Set([...images.value, ...(await Promise.all(files.map(readDataUrl)))])];
  } catch (error) {
    toast((error as Error).message, "error");
  }
}
