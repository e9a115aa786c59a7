// The pages in the order of the menu.
import { page as overview } from "./overview";
import type { Page } from "./page";

export const pages: Page[] = [
  overview,
];
