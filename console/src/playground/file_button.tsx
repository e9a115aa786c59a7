import { useRef } from "preact/hooks";
import { Button } from "../ui/button";
import type { IconName } from "../ui/icon";

export interface FileButtonProps {
  label: string;
  icon?: IconName;
  /** Types or endings that the browser offers, as in HTML; all without it. */
  accept?: string;
  isMultiple?: boolean;
  disabled?: boolean;
  onFiles: (files: File[]) => void;
}

/** A button that lets the user choose files. */
export function FileButton({ label, icon = "upload", accept, isMultiple, disabled, onFiles }: FileButtonProps) {
  const input = useRef<HTMLInputElement>(null);
  const take = (event: Event) => {
    const chosen = event.currentTarget as HTMLInputElement;
    onFiles([...(chosen.files ?? [])]);
    chosen.value = "";
  };
  return (
    <>
      <Button icon={icon} disabled={disabled} onClick={() => input.current?.click()}>
        {label}
      </Button>
      <input
        ref={input}
        hidden
        type="file"
        accept={accept}
        multiple={isMultiple}
        onChange={take}
      />
    </>
  );
}
