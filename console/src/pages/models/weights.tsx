// How the versions of a model share the requests that name no version: a canary gets a small weight first.
import { useState } from "preact/hooks";
import { send } from "../../api/client";
import type { Model } from "../../live/sample";
import { Button } from "../../ui/button";
import { Field } from "../../ui/field";
import { toast } from "../../ui/toast";

export function Weights({ model }: { model: Model }) {
  const ready = model.versions.filter((each) => each.state === "READY");
  const [changed, setChanged] = useState<Record<string, string>>({});
  const weights = ready.map((each) => [each.version, changed[each.version] ?? shownWeight(each.weight)] as const);
  const problem = findProblem(weights.map(([, text]) => text));
  const set = async (value: Record<string, number> | null) => {
    try {
      await send(`/v2/repository/models/${encodeURIComponent(model.name)}/routing`, { body: { weights: value } });
      toast(value ? `${model.name} has new weights.` : `${model.name} has its configured weights.`, "good");
      setChanged({});
    } catch (error) {
      toast(`${model.name}: ${(error as Error).message}`, "error");
    }
  };
  const submit = (event: Event) => {
    event.preventDefault();
    void set(Object.fromEntries(weights.map(([version, text]) => [version, Number(text)])));
  };
  return (
    <form class="weights" onSubmit={submit}>
      <h3>Weights of versions</h3>
      <div class="weights-fields">
        {weights.map(([version, text]) => (
          <Field key={version} label={`Version ${version}`}>
            <input
              type="number"
              min="0"
              step="any"
              value={text}
              onInput={(event) => setChanged({ ...changed, [version]: event.currentTarget.value })}
            />
          </Field>
        ))}
        <Button type="submit" disabled={!Object.keys(changed).length || Boolean(problem)}>
          Set
        </Button>
        <Button kind="quiet" onClick={() => void set(null)}>
          As configured
        </Button>
      </div>
      <p class={problem ? "field-error" : "soft small"} role={problem ? "alert" : undefined}>
        {problem || "Requests that name no version are shared out by these weights. They last until the server ends."}
      </p>
    </form>
  );
}

function shownWeight(weight: number | null): string {
  return weight === null ? "" : String(Math.round(weight * 1000) / 10);
}

function findProblem(texts: string[]): string {
  if (texts.every((each) => each === "")) return "";
  const numbers = texts.map((each) => (each === "" ? NaN : Number(each)));
  if (numbers.some((each) => !(each >= 0))) return "Each version needs a weight of at least 0.";
  return numbers.some((each) => each > 0) ? "" : "One version needs a weight above 0.";
}
