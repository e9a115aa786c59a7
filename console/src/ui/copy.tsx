import { useId, useState } from "preact/hooks";
import { Button } from "./button";
import { Icon } from "./icon";
import { toast } from "./toast";

/** Puts a text into the clipboard, and says so. */
export async function copyText(text: string, what = "Copied"): Promise<void> {
  try {
    await (navigator.clipboard ? navigator.clipboard.writeText(text) : copyBySelection(text));
    toast(what, "good");
  } catch {
    toast("The browser does not allow to copy. Select the text and copy it by hand.", "warning");
  }
}

/** Pages that came over plain HTTP from another machine have no clipboard; this old command works there. */
async function copyBySelection(text: string): Promise<void> {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  if (!isDone) throw new Error("refused");
}

/** A button that copies one text. */
export function Copy({ text, label = "Copy" }: { text: string; label?: string }) {
  return <Button kind="quiet" icon="copy" isSmall label={label} onClick={() => void copyText(text)} />;
}

export interface CopyForm {
  /** What it is copied as, such as "curl". */
  name: string;
  text: () => string;
}

/** A button that offers one thing in several forms: as curl, as Python, as JSON. */
export function CopyAs({ forms, label = "Copy as" }: { forms: CopyForm[]; label?: string }) {
  const id = useId();
  const [isOpen, setOpen] = useState(false);
  const close = (event: FocusEvent) => {
    if (!(event.currentTarget as HTMLElement).contains(event.relatedTarget as Node | null)) setOpen(false);
  };
  const copy = (form: CopyForm) => {
    setOpen(false);
    void copyText(form.text(), `Copied as ${form.name}`);
  };
  return (
    <div class="menu" onFocusOut={close} onKeyDown={(event) => event.key === "Escape" && setOpen(false)}>
      <Button isSmall icon="copy" aria-expanded={isOpen} aria-controls={id} onClick={() => setOpen(!isOpen)}>
        {label} <Icon name="down" size={14} />
      </Button>
      {isOpen && (
        <div class="menu-list" id={id}>
          {forms.map((each) => (
            <button type="button" key={each.name} onClick={() => copy(each)}>
              {each.name}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
