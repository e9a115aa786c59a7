// The models of the repository: their versions and states, loading and unloading, the weights of versions.
import { useState } from "preact/hooks";
import { send } from "../../api/client";
import { useFetched } from "../../api/use";
import { sample } from "../../live/connection";
import type { Model, ModelVersion, Sample } from "../../live/sample";
import { MODEL_TONES } from "../../live/words";
import { linkTo } from "../../router";
import { Button } from "../../ui/button";
import { confirm } from "../../ui/dialog";
import { count, percent } from "../../ui/format";
import { Badge, Empty, Head, Notice, Panel } from "../../ui/layout";
import { Table } from "../../ui/table";
import { toast } from "../../ui/toast";
import type { Page } from "../page";
import "./models.css";
import { Weights } from "./weights";

interface IndexRow {
  name: string;
  version?: string;
  state?: Model["state"];
  reason?: string;
}

function Models() {
  const index = useFetched<IndexRow[]>("/v2/repository/index", { method: "POST", body: {} });
  const models = mergeIndex((sample.value as Sample).models, index.value ?? []);
  const ordered = [...models.filter((each) => each.is_llm), ...models.filter((each) => !each.is_llm)];
  return (
    <>
      <Head title="Models" lead="What the repository has, and what of it is served.">
        <Button icon="refresh" onClick={index.reload}>
          Read the repository
        </Button>
      </Head>
      {index.error && <Notice tone="warning">The repository cannot be read: {index.error}</Notice>}
      {ordered.map((each) => (
        <ModelView key={each.name} model={each} onChange={index.reload} />
      ))}
      {!models.length && (
        <Panel>
          <Empty icon="models" title="There is no model" />
        </Panel>
      )}
    </>
  );
}

/** Adds the models that were never loaded: the server's samples have none of them. */
function mergeIndex(models: Model[], index: IndexRow[]): Model[] {
  const known = new Set(models.map((each) => each.name));
  const others = index.filter((each) => !known.has(each.name) && !each.name.includes(":"));
  const names = [...new Set(others.map((each) => each.name))];
  return [...models, ...names.map((name) => asModel(name, others.filter((each) => each.name === name)))];
}

function asModel(name: string, rows: IndexRow[]): Model {
  const versions = rows
    .filter((each) => each.version)
    .map((each) => ({
      version: each.version ?? "",
      state: each.state ?? "",
      reason: each.reason ?? "",
      weight: null,
      in_flight: 0,
    }));
  return { name, state: versions[0]?.state ?? "", is_llm: false, versions };
}

function ModelView({ model, onChange }: { model: Model; onChange: () => void }) {
  const isReady = model.state === "READY";
  return (
    <Panel
      class="model"
      title={
        <span class="row">
          {model.name}
          <Badge tone={MODEL_TONES[model.state]}>{wordOf(model.state)}</Badge>
          {model.is_llm && (
            <a class="small" href={linkTo("engines", model.name)}>
              Engines
            </a>
          )}
        </span>
      }
      actions={<Actions model={model} isReady={isReady} onChange={onChange} />}
    >
      {model.versions.length > 0 && <Versions model={model} />}
      {model.versions.filter((each) => each.state === "READY").length > 1 && <Weights model={model} />}
    </Panel>
  );
}

function wordOf(state: Model["state"]): string {
  return state ? state.toLowerCase() : "not loaded";
}

function Versions({ model }: { model: Model }) {
  const isWeighted = model.versions.some((each) => each.weight !== null);
  return (
    <Table<ModelVersion>
      caption={`Versions of ${model.name}`}
      rows={model.versions}
      keyOf={(each) => each.version}
      columns={[
        { title: "Version", cell: (each) => `Version ${each.version}` },
        {
          title: "State",
          cell: (each) => (
            <span class="row">
              <Badge tone={MODEL_TONES[each.state]}>{wordOf(each.state)}</Badge>
              {each.reason && <span class="soft small">{each.reason}</span>}
            </span>
          ),
        },
        ...(isWeighted
          ? [{ title: "Share", isNumber: true, cell: (each: ModelVersion) => percent(each.weight) }]
          : []),
        { title: "In flight", isNumber: true, cell: (each) => count(each.in_flight) },
      ]}
    />
  );
}

interface ActionProps {
  model: Model;
  isReady: boolean;
  onChange: () => void;
}

function Actions({ model, isReady, onChange }: ActionProps) {
  const [busy, setBusy] = useState("");
  const run = async (action: "load" | "unload") => {
    setBusy(action);
    try {
      await send(`/v2/repository/models/${encodeURIComponent(model.name)}/${action}`, { method: "POST", body: {} });
      toast(action === "load" ? `${model.name} is loaded.` : `${model.name} is being unloaded.`, "good");
    } catch (error) {
      toast(`${model.name}: ${(error as Error).message}`, "error");
    }
    setBusy("");
    onChange();
  };
  const unload = async () => {
    const text = "Requests that are open end first; new ones are refused until it is loaded again.";
    if (await confirm(`Unload ${model.name}?`, text, "Unload")) await run("unload");
  };
  return (
    <>
      <Button isSmall isBusy={busy === "load"} disabled={Boolean(busy)} onClick={() => void run("load")}>
        {isReady ? "Load again" : "Load"}
      </Button>
      {isReady && (
        <Button
          kind="danger"
          isSmall
          isBusy={busy === "unload"}
          disabled={Boolean(busy)}
          onClick={() => void unload()}
        >
          Unload
        </Button>
      )}
    </>
  );
}

export const page: Page = {
  name: "models",
  title: "Models",
  icon: "models",
  section: "Operate",
  isForAdmins: true,
  view: Models,
};
