// The conversation and its settings. They stay while other pages are shown.
import { computed, signal } from "@preact/signals";
import { abilitiesOf } from "../../playground/models";
import { Lane } from "./lane";
import { NO_SETTINGS, readSettings, type Asked, type Settings, type Turn } from "./request";

const first = new Lane();
const second = new Lane();

export const settings = signal<Settings>(NO_SETTINGS);
export const isComparing = signal(false);
export const isColored = signal(true);
/** What stands in the composer. */
export const draft = signal("");
export const images = signal<string[]>([]);

/** The sides of the conversation that are shown: one, or two that are compared. */
export const lanes = computed(() => (isComparing.value ? [first, second] : [first]));
export const isBusy = computed(() => lanes.value.some((each) => each.isBusy.value));
export const asked = computed<Asked>(() => readSettings(settings.value));

/** Whether all of the chosen models are known to take something. */
export function canAll(ability: "hasImages" | "isLanguageModel"): boolean {
  return lanes.value.every((each) => abilitiesOf(each.model.value)?.[ability]);
}

/** Changes some of the settings. */
export function change(some: Partial<Settings>): void {
  settings.value = { ...settings.value, ...some };
}

/** Returns what to ask of a lane's model: no probabilities of a pipeline, which has none. */
export function askedOf(lane: Lane): Asked {
  const isPipeline = abilitiesOf(lane.model.value)?.isLanguageModel === false;
  return isPipeline ? readSettings({ ...settings.value, hasLogprobs: false }) : asked.value;
}

/** Returns the draft as a turn. */
export function draftTurn(): Turn {
  return { kind: "user", text: draft.value, images: images.value };
}

/** Sends the draft to every lane. */
export function send(): void {
  const turn = draftTurn();
  draft.value = "";
  images.value = [];
  for (const lane of lanes.value) void lane.ask(turn, askedOf(lane), settings.value.system);
}

export function clear(): void {
  for (const lane of [first, second]) lane.clear();
}

/** Takes models that the server has: the first for one side, the next for the other. */
export function chooseModels(names: string[]): void {
  [first, second].forEach((lane, n) => {
    if (!names.includes(lane.model.value)) lane.model.value = names[n] ?? names[0] ?? "";
  });
}
