// Which models can chat, and what each of them takes.
import { signal } from "@preact/signals";
import { ApiError, fetchJson } from "../api/client";

export interface Abilities {
  hasTools: boolean;
  hasImages: boolean;
  /** Whether it is a language model itself, which tells its tokens' probabilities; a pipeline does not. */
  isLanguageModel: boolean;
}

/** The names of the models that generate text; null while they are being asked for. */
export const chatModels = signal<string[] | null>(null);
/** Why there is no list; "" where there is one. */
export const modelsFault = signal("");
const abilities = signal<Record<string, Abilities>>({});

interface Tag {
  name: string;
  details: { family: string };
}

/** Asks the server for its models. */
export async function loadModels(): Promise<void> {
  try {
    const listed = await fetchJson<{ data: { id: string }[] }>("/v1/models");
    const encoders = await findEncoders();
    chatModels.value = listed.data.map((each) => each.id).filter((id) => !encoders.has(id));
    modelsFault.value = "";
  } catch (error) {
    modelsFault.value = (error as Error).message;
  }
}

/** The list has models of every kind. Where a key may not see their kinds, it stays whole. */
async function findEncoders(): Promise<Set<string>> {
  try {
    const { models } = await fetchJson<{ models: Tag[] }>("/api/tags");
    const encoders = models.filter((each) => each.details.family === "encoder");
    return new Set(encoders.map((each) => each.name.replace(/:latest$/, "")));
  } catch (error) {
    if (error instanceof ApiError) return new Set();
    throw error;
  }
}

/** Returns what a model takes; null where that is not known yet, or the key may not ask. */
export function abilitiesOf(model: string): Abilities | null {
  return abilities.value[model] ?? null;
}

/** Asks what a model takes, once. */
export async function loadAbilities(model: string): Promise<void> {
  if (!model || abilities.value[model]) return;
  try {
    const shown = await fetchJson<{ capabilities: string[]; details: { family: string } }>("/api/show", { body: { model } });
    const has = (name: string) => shown.capabilities.includes(name);
    const found = {
      hasTools: has("tools"),
      hasImages: has("vision"),
      isLanguageModel: shown.details.family !== "pipeline",
    };
    abilities.value = { ...abilities.value, [model]: found };
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
  }
}
