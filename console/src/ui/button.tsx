import type { ComponentChildren, JSX } from "preact";
import { Icon, type IconName } from "./icon";

type Own = JSX.IntrinsicElements["button"];

export interface ButtonProps extends Omit<Own, "icon" | "size"> {
  kind?: "plain" | "primary" | "danger" | "quiet";
  icon?: IconName;
  /** Shown by screen readers and as a tip, where there is an icon alone. */
  label?: string;
  isBusy?: boolean;
  isSmall?: boolean;
  children?: ComponentChildren;
}

/** A button with text, an icon or both. While it is busy it takes no clicks. */
export function Button({ kind = "plain", icon, label, isBusy, isSmall, children, ...rest }: ButtonProps) {
  const classes = ["button", `button-${kind}`, isSmall && "button-small", !children && "button-icon"];
  return (
    <button
      type="button"
      {...rest}
      class={[...classes, rest.class].filter(Boolean).join(" ")}
      disabled={Boolean(rest.disabled) || isBusy}
      aria-busy={isBusy}
      aria-label={label ?? rest["aria-label"]}
      title={label}
    >
      {isBusy ? <span class="spinner" /> : icon && <Icon name={icon} size={isSmall ? 15 : 18} />}
      {children}
    </button>
  );
}
