import type { ComponentChildren } from "preact";
import { Button } from "../../ui/button";
import { Field, Switch } from "../../ui/field";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS, type Settings } from "./request";
import { asked, canAll, change, isColored, settings } from "./state";

type TextKey = { [Key in keyof Settings]: Settings[Key] extends string ? Key : never }[keyof Settings];

/** The fields of the request besides its messages. */
export function SettingsView() {
  return (
    <div class="settings">
      <Area name="system" label="System prompt" rows={3} />
      <div class="settings-grid">
        <Line name="maxTokens" label="max_tokens" />
        <Line name="temperature" label="temperature" />
        <Line name="topP" label="top_p" />
        <Line name="seed" label="seed" />
      </div>
      <Area name="stop" label="stop" rows={2} hint="One text a line; the answer ends before it." />
      <Probabilities />
      <Part title="Tools" isOpen={Boolean(settings.value.tools)}>
        <Area name="tools" label="Tools" rows={8} isCode hint="A JSON array, as OpenAI has it." />
        <Example name="tools" text={EXAMPLE_TOOLS} />
        <Field label="tool_choice">
          <select value={settings.value.toolChoice} onChange={(event) => chooseTool(event.currentTarget as HTMLSelectElement)}>
            <option value="">the server's default</option>
            {["auto", "none", "required"].map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </Field>
      </Part>
      <Part title="Structured output" isOpen={Boolean(settings.value.schema)}>
        <Area name="schema" label="JSON schema" rows={8} isCode hint="The answer matches it." />
        <Example name="schema" text={EXAMPLE_SCHEMA} />
      </Part>
      <Part title="Further fields" isOpen={Boolean(settings.value.more)}>
        <Area name="more" label="Further fields" rows={4} isCode hint='A JSON object, such as {"top_k": 20, "min_p": 0.05}.' />
      </Part>
    </div>
  );
}

function chooseTool(chosen: HTMLSelectElement): void {
  change({ toolChoice: chosen.value as Settings["toolChoice"] });
}

function Probabilities() {
  const { hasLogprobs } = settings.value;
  return (
    <>
      <Switch label="Token probabilities" isOn={hasLogprobs} onChange={(isOn) => change({ hasLogprobs: isOn })} />
      {hasLogprobs && (
        <>
          <Switch label="Colour tokens" isOn={isColored.value} onChange={(isOn) => (isColored.value = isOn)} />
          <Line name="topLogprobs" label="top_logprobs" />
          {!canAll("isLanguageModel") && <p class="field-hint">Pipelines have no probabilities; they are not asked for any.</p>}
        </>
      )}
    </>
  );
}

function Part({ title, isOpen, children }: { title: string; isOpen: boolean; children: ComponentChildren }) {
  return (
    <details class="settings-part" open={isOpen}>
      <summary>{title}</summary>
      {children}
    </details>
  );
}

function Example({ name, text }: { name: TextKey; text: string }) {
  const isFilled = Boolean(settings.value[name]);
  return (
    <Button isSmall onClick={() => change({ [name]: isFilled ? "" : text })}>
      {isFilled ? "Clear" : "Insert an example"}
    </Button>
  );
}

function Line({ name, label }: { name: TextKey; label: string }) {
  return (
    <Field label={label} error={asked.value.faults[name]}>
      <input
        type="text"
        inputMode="decimal"
        autocomplete="off"
        placeholder="default"
        value={settings.value[name]}
        onInput={(event) => change({ [name]: event.currentTarget.value })}
      />
    </Field>
  );
}

interface AreaProps {
  name: TextKey;
  label: string;
  rows: number;
  hint?: string;
  isCode?: boolean;
}

function Area({ name, label, rows, hint, isCode }: AreaProps) {
  return (
    <Field label={label} hint={hint} error={asked.value.faults[name]}>
      <textarea
        rows={rows}
        class={isCode ? "code" : ""}
        spellcheck={!isCode}
        value={settings.value[name]}
        onInput={(event) => change({ [name]: event.currentTarget.value })}
      />
    </Field>
  );
}
