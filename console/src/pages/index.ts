// The pages in the order of the menu.
import { page as chat } from "./chat";
import { page as engines } from "./engines";
import { page as infer } from "./infer";
import { page as log } from "./log";
import { page as models } from "./models";
import { page as overview } from "./overview";
import type { Page } from "./page";
import { page as rag } from "./rag";
import { page as requests } from "./requests";
import { page as tenants } from "./tenants";
import { page as timelines } from "./timelines";

export const pages: Page[] = [
  overview,
  engines,
  requests,
  timelines,
  models,
  tenants,
  log,
  chat,
  rag,
  infer,
];
