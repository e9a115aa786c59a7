import { useEffect } from "preact/hooks";
import "../../playground/playground.css";
import "./infer.css";
import { FailureNotice } from "../../playground/failure";
import { parseObject } from "../../playground/json";
import { ModelSelect } from "../../playground/model_select";
import { findPlace, loadPlace } from "../../playground/place";
import { Button } from "../../ui/button";
import { CopyAs } from "../../ui/copy";
import { Field, Switch } from "../../ui/field";
import { Empty, Head, Panel } from "../../ui/layout";
import type { Page } from "../page";
import { Inputs } from "./inputs";
import type { InferRequest } from "./request";
import { Results } from "./results";
import { filesOf, generateCurl, inferCurl, inferPython, streamGrpc, streamPython } from "./snippets";
import {
  choose,
  chosen,
  failure,
  isBusy,
  isDecoupled,
  loadNames,
  model,
  names,
  outputs,
  parameters,
  request,
  run,
  stop,
  streams,
  version,
} from "./state";

function Infer() {
  useEffect(() => {
    void loadNames();
    void loadPlace();
  }, []);
  return (
    <>
      <Head title="Infer" lead="Run any model of the repository, with a form made of its metadata." />
      {names.value?.length === 0 && <Empty icon="models" title="No model is ready." />}
      {failure.value && !model.value && <FailureNotice failure={failure.value} />}
      {names.value && names.value.length > 0 && (
        <div class="infer">
          <div class="stack">
            <Panel title="Request" actions={request.value && <Copies asked={request.value} />}>
              <div class="stack">
                <ModelChoice />
                {model.value && <Form />}
              </div>
            </Panel>
          </div>
          <div class="stack">
            {failure.value && model.value && <FailureNotice failure={failure.value} />}
            <Results />
          </div>
        </div>
      )}
    </>
  );
}

function ModelChoice() {
  const versions = model.value?.info.versions ?? [];
  return (
    <div class="settings-grid">
      <ModelSelect label="Model" names={names.value ?? []} value={chosen.value} onChange={(name) => void choose(name)} />
      <Field label="Version">
        <select value={version.value} onChange={(event) => void choose(chosen.value, (event.currentTarget as HTMLSelectElement).value)}>
          <option value="">the server's choice</option>
          {[...new Set([...versions, ...(version.value ? [version.value] : [])])].map((each) => (
            <option key={each}>{each}</option>
          ))}
        </select>
      </Field>
    </div>
  );
}

function Form() {
  const fault = parseObject(parameters.value).error;
  return (
    <>
      <Inputs />
      <Field label="Parameters" hint='A JSON object, such as {"max_tokens": 20}.' error={fault}>
        <textarea
          rows={2}
          class="code"
          spellcheck={false}
          value={parameters.value}
          onInput={(event) => (parameters.value = event.currentTarget.value)}
        />
      </Field>
      {isDecoupled.value && (
        <Switch label="Stream the responses (generate_stream)" isOn={streams.value} onChange={(isOn) => (streams.value = isOn)} />
      )}
      {!streams.value && <Outputs />}
      <div class="row">
        {isBusy.value ? (
          <Button kind="danger" icon="stop" onClick={stop}>
            Stop
          </Button>
        ) : (
          <Button kind="primary" icon="play" disabled={!request.value} onClick={() => void run()}>
            Run
          </Button>
        )}
      </div>
    </>
  );
}

/** Which outputs to return. None chosen: those that the model returns by itself. */
function Outputs() {
  const toggle = (name: string, isOn: boolean) => {
    const others = outputs.value.filter((each) => each.name !== name);
    outputs.value = isOn ? [...others, { name, classes: 0 }] : others;
  };
  const count = (name: string, classes: number) =>
    (outputs.value = outputs.value.map((each) => (each.name === name ? { name, classes } : each)));
  return (
    <details open={outputs.value.length > 0}>
      <summary>Outputs: {outputs.value.length || "the model's choice"}</summary>
      <ul class="outputs">
        {model.value?.info.outputs.map(({ name, datatype, shape }) => {
          const chosenOutput = outputs.value.find((each) => each.name === name);
          return (
            <li key={name}>
              <label>
                <input type="checkbox" checked={Boolean(chosenOutput)} onChange={(event) => toggle(name, event.currentTarget.checked)} />{" "}
                <code>{name}</code>{" "}
                <span class="field-hint">
                  {datatype} [{shape.join(", ")}]
                </span>
              </label>
              {chosenOutput && (
                <input
                  type="number"
                  min="0"
                  aria-label={`Classes of ${name}`}
                  placeholder="classes"
                  title="The so many likeliest classes in place of the tensor"
                  value={chosenOutput.classes || ""}
                  onInput={(event) => count(name, Number(event.currentTarget.value))}
                />
              )}
            </li>
          );
        })}
      </ul>
    </details>
  );
}

function Copies({ asked }: { asked: InferRequest }) {
  const place = findPlace();
  const once = [
    { name: "curl", text: () => inferCurl(place, asked) },
    { name: "Python (tritonclient HTTP)", text: () => inferPython(place, asked, "http") },
    ...(place.grpc && !isDecoupled.value ? [{ name: "Python (gRPC)", text: () => inferPython(place, asked, "grpc") }] : []),
  ];
  const stream = [
    { name: "curl", text: () => generateCurl(place, asked) },
    { name: "Python (standard library)", text: () => streamPython(place, asked) },
    ...(place.grpc ? [{ name: "Python (gRPC)", text: () => streamGrpc(place, asked) }] : []),
  ];
  const files = filesOf(asked);
  return (
    <>
      {files.length > 0 && (
        <Button isSmall icon="down" onClick={() => files.forEach(save)}>
          Save the files of the code
        </Button>
      )}
      <CopyAs forms={streams.value ? stream : once} />
    </>
  );
}

/** How long the browser may take to begin a download. */
const KEPT_MS = 10_000;

function save({ name, content }: { name: string; content: Blob }): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), KEPT_MS);
}

export const page: Page = {
  name: "infer",
  title: "Infer",
  icon: "infer",
  section: "Playground",
  isForAdmins: false,
  view: Infer,
};
