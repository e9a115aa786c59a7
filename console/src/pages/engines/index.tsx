// What each engine does now: its KV cache, its last steps, its sequences.
import { sample } from "../../live/connection";
import { engineKey } from "../../live/history";
import type { Engine, Sample, Sequence } from "../../live/sample";
import { ENGINE_TONES, isDown, nameEngine } from "../../live/words";
import { linkTo } from "../../router";
import { count, duration, percent, short } from "../../ui/format";
import { Badge, Empty, Figure, Head, Notice, Panel } from "../../ui/layout";
import { Progress } from "../requests/progress";
import type { Page, PageProps } from "../page";
import { Cache } from "./cache";
import "../requests/requests.css";
import "./engines.css";
import { Steps } from "./steps";

const MOST_SEQUENCES = 24;

function Engines({ words: [model, replica] }: PageProps) {
  const now = sample.value as Sample;
  const shown = now.engines.filter(
    (each) => (!model || each.model === model) && (!replica || each.replica === replica),
  );
  return (
    <>
      <Head title="Engines" lead={<Lead now={now} model={model} />} />
      {shown.map((each) => (
        <EngineView key={engineKey(each)} engine={each} now={now} />
      ))}
      {!shown.length && (
        <Panel>
          <Empty icon="engines" title={model ? `No engine of ${model} is there` : "No language model is loaded"}>
            <p>An engine is the process that runs one replica of a language model.</p>
          </Empty>
        </Panel>
      )}
    </>
  );
}

function Lead({ now, model }: { now: Sample; model?: string }) {
  if (model) return <a href={linkTo("engines")}>Show all {now.engines.length} engines</a>;
  const num = now.engines.length;
  return num === 1 ? <>1 engine</> : <>{num} engines</>;
}

function EngineView({ engine, now }: { engine: Engine; now: Sample }) {
  const sequences = now.sequences.items.filter((each) => isOf(each, engine));
  return (
    <Panel class={`engine ${isDown(engine) ? "engine-down" : ""}`} title={<Name engine={engine} now={now} />}>
      {engine.reason && (
        <Notice tone={engine.state === "failed" ? "error" : "warning"}>
          The engine is {engine.state}: {engine.reason}
        </Notice>
      )}
      <EngineFigures engine={engine} />
      <div class="engine-parts">
        <Cache engine={engine} />
        <Steps engine={engine} />
      </div>
      <Sequences sequences={sequences} />
    </Panel>
  );
}

function isOf(sequence: Sequence, engine: Engine): boolean {
  return (
    sequence.model === engine.model && sequence.version === engine.version && sequence.replica === engine.replica
  );
}

function Name({ engine, now }: { engine: Engine; now: Sample }) {
  const replica = now.replicas.find((each) => each.model === engine.model && each.name === engine.replica);
  const routed = replica ? `${count(replica.num_routed)} requests routed here` : "";
  const facts = [engine.runtime, engine.policy.replaceAll("_", " "), nameProcesses(engine), routed].filter(Boolean);
  return (
    <span class="row">
      {nameEngine(engine, now.engines)}
      <Badge tone={ENGINE_TONES[engine.state]}>{engine.state}</Badge>
      {engine.num_restarts > 0 && <Badge tone="warning">{engine.num_restarts === 1 ? "1 restart" : `${engine.num_restarts} restarts`}</Badge>}
      <span class="soft small engine-facts">{facts.join(" · ")}</span>
    </span>
  );
}

function nameProcesses({ pids }: Engine): string {
  return pids.length ? `${pids.length > 1 ? "processes" : "process"} ${pids.join(", ")}` : "";
}

function EngineFigures({ engine }: { engine: Engine }) {
  const wait = engine.predicted_wait_s;
  return (
    <div class="engine-figures">
      <Figure label="Generated" value={short(engine.generated_tokens_per_s)} unit="tokens/s" />
      <Figure label="Prompts" value={short(engine.prompt_tokens_per_s)} unit="tokens/s" />
      <Figure label="Running" value={count(engine.running)} unit={`of ${count(engine.max_num_seqs)}`} />
      <Figure
        label="Waiting"
        value={count(engine.waiting)}
        unit={engine.waiting && wait ? `${duration(wait)} to go` : undefined}
      />
      <Figure label="Steps" value={short(engine.steps_per_s)} unit="/s" />
      <Figure label="Busy" value={percent(engine.busy)} />
    </div>
  );
}

function Sequences({ sequences }: { sequences: Sequence[] }) {
  const left = sequences.length - MOST_SEQUENCES;
  return (
    <section>
      <h3>Sequences</h3>
      {!sequences.length && <p class="soft small">None is open.</p>}
      <ul class="sequences">
        {sequences.slice(0, MOST_SEQUENCES).map((each) => (
          <li key={each.id}>
            <Progress sequence={each} />
          </li>
        ))}
      </ul>
      {left > 0 && (
        <p class="soft small">
          {left} more are on the page of <a href={linkTo("requests")}>requests</a>.
        </p>
      )}
    </section>
  );
}

export const page: Page = {
  name: "engines",
  title: "Engines",
  icon: "engines",
  section: "Operate",
  isForAdmins: true,
  view: Engines,
};
