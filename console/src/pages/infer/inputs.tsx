import { FileButton } from "../../playground/file_button";
import { Button } from "../../ui/button";
import { Field, Switch } from "../../ui/field";
import { SCALINGS, type Scaling } from "./image";
import { buildTensor, changeInput, inputs, readFiles, rescale, type InputForm } from "./state";
import { DATATYPES, type Datatype } from "./types";
import { isFloat } from "./values";

/** A form of all the inputs of the model: first those that are sent, then the optional ones, folded. */
export function Inputs() {
  const shown = inputs.value.filter((each) => !each.isOptional || each.isOn);
  const others = inputs.value.filter((each) => each.isOptional && !each.isOn);
  return (
    <div class="stack">
      {shown.map((each) => (
        <InputView key={each.info.name} input={each} />
      ))}
      {others.length > 0 && (
        <details>
          <summary>Optional inputs ({others.length})</summary>
          <div class="optional-inputs">
            {others.map(({ info }) => (
              <Button key={info.name} isSmall icon="plus" onClick={() => changeInput(info.name, { isOn: true })}>
                {info.name}
              </Button>
            ))}
          </div>
        </details>
      )}
    </div>
  );
}

function InputView({ input }: { input: InputForm }) {
  const { info, isOptional } = input;
  const built = buildTensor(input);
  return (
    <fieldset class="tensor">
      <legend>
        <code>{info.name}</code>
        <span class="field-hint">
          {info.datatype} [{info.shape.join(", ")}]
        </span>
      </legend>
      {input.files ? <FileValue input={input} error={built.error} /> : <TypedValue input={input} error={built.error} />}
      <div class="row">
        <FileButton
          label={input.layout ? "Image or file" : "File"}
          isMultiple={input.datatype === "BYTES"}
          onFiles={(files) => void readFiles(input, files)}
        />
        {isOptional && (
          <Button kind="quiet" icon="trash" onClick={() => changeInput(info.name, { isOn: false })}>
            Leave out
          </Button>
        )}
      </div>
      <div class="settings-grid">
        <Shape input={input} automatic={built.tensor?.shape} />
        <DatatypeSelect input={input} />
        {input.layout && isFloat(input.datatype) && <ScalingSelect input={input} />}
      </div>
    </fieldset>
  );
}

interface ValueProps {
  input: InputForm;
  error: string | undefined;
}

function TypedValue({ input, error }: ValueProps) {
  const { info, text } = input;
  const hint = input.datatype === "BYTES" ? "Text, or a JSON array of texts." : "A JSON array, nested or flat.";
  return (
    <Field label={`Value of ${info.name}`} hint={hint} error={error}>
      <textarea
        rows={input.datatype === "BYTES" ? 2 : 3}
        class="code"
        spellcheck={false}
        value={text}
        onInput={(event) => changeInput(info.name, { text: event.currentTarget.value })}
      />
    </Field>
  );
}

function FileValue({ input, error }: ValueProps) {
  const files = input.files;
  if (!files) return null;
  return (
    <div class="file-value">
      {files.picture && <img src={files.picture} alt={files.names.join(", ")} />}
      <div>
        <p>{files.names.join(", ")}</p>
        <p class="field-hint">
          {files.elements.length} elements, [{files.shape.join(", ")}]
        </p>
        {error && (
          <p class="field-error" role="alert">
            {error}
          </p>
        )}
        <Switch label="Type the value instead" isOn={false} onChange={() => changeInput(input.info.name, { files: null })} />
      </div>
    </div>
  );
}

function Shape({ input, automatic }: { input: InputForm; automatic: number[] | undefined }) {
  return (
    <Field label="Shape">
      <input
        type="text"
        class="code"
        autocomplete="off"
        aria-label={`Shape of ${input.info.name}`}
        placeholder={automatic ? automatic.join(", ") : "as the values"}
        value={input.shape}
        onInput={(event) => changeInput(input.info.name, { shape: event.currentTarget.value })}
      />
    </Field>
  );
}

function DatatypeSelect({ input }: { input: InputForm }) {
  const change = (event: Event) =>
    changeInput(input.info.name, { datatype: (event.currentTarget as HTMLSelectElement).value as Datatype });
  return (
    <Field label="Datatype">
      <select aria-label={`Datatype of ${input.info.name}`} value={input.datatype} onChange={change}>
        {DATATYPES.map((each) => (
          <option key={each}>{each}</option>
        ))}
      </select>
    </Field>
  );
}

function ScalingSelect({ input }: { input: InputForm }) {
  const change = (event: Event) => void rescale(input, (event.currentTarget as HTMLSelectElement).value as Scaling);
  return (
    <Field label="Pixels">
      <select aria-label={`Pixels of ${input.info.name}`} value={input.scaling} onChange={change}>
        {Object.entries(SCALINGS).map(([name, text]) => (
          <option key={name} value={name}>
            {text}
          </option>
        ))}
      </select>
    </Field>
  );
}
