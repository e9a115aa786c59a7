import { cloneElement, type VNode } from "preact";
import { useId } from "preact/hooks";

export interface FieldProps {
  label: string;
  hint?: string;
  error?: string;
  /** One input, select or textarea, which gets the field's id. */
  children: VNode<Record<string, unknown>>;
}

/** A control with its label, its hint and what is wrong with its value. */
export function Field({ label, hint, error, children }: FieldProps) {
  const id = useId();
  const described = [hint && `${id}-hint`, error && `${id}-error`].filter(Boolean).join(" ");
  const control = { id, "aria-describedby": described || undefined, "aria-invalid": error ? true : undefined };
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {cloneElement(children, control)}
      {hint && (
        <p class="field-hint" id={`${id}-hint`}>
          {hint}
        </p>
      )}
      {error && (
        <p class="field-error" id={`${id}-error`} role="alert">
          {error}
        </p>
      )}
    </div>
  );
}

export interface SwitchProps {
  label: string;
  isOn: boolean;
  onChange: (isOn: boolean) => void;
  disabled?: boolean;
}

/** A setting that is on or off. */
export function Switch({ label, isOn, onChange, disabled }: SwitchProps) {
  return (
    <label class="switch">
      <input
        type="checkbox"
        role="switch"
        checked={isOn}
        disabled={disabled}
        onChange={(event) => onChange(event.currentTarget.checked)}
      />
      <span>{label}</span>
    </label>
  );
}
