import type { ComponentType } from "preact";
import type { IconName } from "../ui/icon";

/** A page of the console. Its folder exports one as `page`, which index.ts lists. */
export interface Page {
  /** The first word of its address, such as "engines" of #/engines. */
  name: string;
  title: string;
  icon: IconName;
  section: "Operate" | "Playground";
  /** Whether it shows what only keys with the admin right may see. */
  isForAdmins: boolean;
  view: ComponentType<PageProps>;
}

export interface PageProps {
  /** The words of the address after the page's name. */
  words: string[];
}
