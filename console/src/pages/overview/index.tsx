// One look to know whether tokens flow, and why not.
import { sample } from "../../live/connection";
import type { Engine, Percentiles, Sample, Warning } from "../../live/sample";
import { ALERT_TONES, ENGINE_TONES, LOG_TONES, nameEngine, SERVER_TONES } from "../../live/words";
import { linkTo } from "../../router";
import { Chart } from "../../ui/chart";
import { clock, count, duration, milliseconds, percent, short } from "../../ui/format";
import { Badge, Empty, Figure, Head, Meter, Notice, Panel } from "../../ui/layout";
import { Table } from "../../ui/table";
import type { Page } from "../page";

const NUM_WARNINGS = 5;

function Overview() {
  const now = sample.value as Sample;
  return (
    <>
      <Head title="Overview" lead={<Server server={now.server} />} />
      <Alerts now={now} />
      <Figures now={now} />
      <Throughput />
      <div class="grid">
        <Latency title="Time to first token" at="ttft" values={now.latency.ttft_ms} />
        <Latency title="Time between tokens" at="itl" values={now.latency.itl_ms} />
        <Panel title="Sequences">
          <Chart
            label="Sequences"
            format={count}
            height={150}
            lines={[
              { name: "running", label: "running", color: "series-1", isFilled: true },
              { name: "waiting", label: "waiting", color: "series-2" },
            ]}
          />
        </Panel>
      </div>
      <Engines engines={now.engines} />
      <Warnings warnings={now.warnings} />
    </>
  );
}

function Server({ server }: { server: Sample["server"] }) {
  return (
    <span class="row">
      <Badge tone={SERVER_TONES[server.state]}>{server.state}</Badge>
      <span>
        Sluice {server.version}, up {duration(server.uptime_s)}
        {server.num_workers > 0 && `, ${server.num_workers} HTTP workers`}
        {server.reason && `: ${server.reason}`}
      </span>
    </span>
  );
}

function Alerts({ now }: { now: Sample }) {
  if (!now.alerts.length) return null;
  return (
    <div class="stack stack-tight">
      {now.alerts.map((each) => (
        <Notice tone={ALERT_TONES[each.level]} key={`${each.kind} ${each.subject}`}>
          <strong>{each.subject}</strong>: {each.text}
          {each.remedy && <div class="soft small">What helps: {each.remedy}</div>}
        </Notice>
      ))}
    </div>
  );
}

function Figures({ now }: { now: Sample }) {
  const { throughput: flow, latency } = now;
  const isFailing = flow.errors_per_s > 0;
  return (
    <Panel class="figures">
      <Figure
        label="Generated"
        value={short(flow.generated_tokens_per_s)}
        unit="tokens/s"
        note={`${count(flow.open_streams)} open streams`}
      />
      <Figure
        label="Prompts"
        value={short(flow.prompt_tokens_per_s)}
        unit="tokens/s"
        note={`${short(flow.cached_tokens_per_s)}/s cached`}
      />
      <Figure
        label="First token"
        value={milliseconds(latency.ttft_ms.p50)}
        note={`90 % within ${milliseconds(latency.ttft_ms.p90)}`}
      />
      <Figure
        label="Between tokens"
        value={milliseconds(latency.itl_ms.p50)}
        note={`90 % within ${milliseconds(latency.itl_ms.p90)}`}
      />
      <Figure
        label="Running"
        value={count(flow.running)}
        note={
          <span class={flow.waiting ? "tone-warning emphasis" : ""}>
            {count(flow.waiting)} waiting
          </span>
        }
      />
      <Figure
        label="Requests"
        value={short(flow.requests_per_s)}
        unit="/s"
        note={<span class={isFailing ? "tone-error emphasis" : ""}>{short(flow.errors_per_s)}/s fail</span>}
      />
    </Panel>
  );
}

function Throughput() {
  return (
    <Panel title="Tokens per second">
      <Chart
        label="Tokens per second"
        format={short}
        height={220}
        lines={[
          { name: "generated", label: "generated", color: "series-1", isFilled: true },
          { name: "prompt", label: "prompts", color: "series-2" },
          { name: "cached", label: "from the prefix cache", color: "series-3" },
        ]}
      />
    </Panel>
  );
}

function Latency({ title, at, values }: { title: string; at: "ttft" | "itl"; values: Percentiles }) {
  return (
    <Panel title={title} actions={<span class="soft small">of {short(values.count)}</span>}>
      <Chart
        label={title}
        format={milliseconds}
        height={150}
        lines={[
          { name: `${at}50`, label: "median", color: "series-1" },
          { name: `${at}99`, label: "99 %", color: "series-2" },
        ]}
      />
    </Panel>
  );
}

function Engines({ engines }: { engines: Engine[] }) {
  return (
    <Panel title="Engines">
      <Table
        caption="Engines"
        rows={engines}
        keyOf={(each) => `${each.model}/${each.version}/${each.replica}`}
        empty={<Empty icon="engines" title="No language model is loaded" />}
        columns={[
          {
            title: "Engine",
            cell: (each) => <a href={linkTo("engines", each.model, each.replica)}>{nameEngine(each, engines)}</a>,
          },
          { title: "State", cell: (each) => <Badge tone={ENGINE_TONES[each.state]}>{each.state}</Badge> },
          { title: "KV cache reserved", cell: (each) => <CacheUse engine={each} /> },
          { title: "Running", isNumber: true, cell: (each) => `${count(each.running)} of ${count(each.max_num_seqs)}` },
          { title: "Waiting", isNumber: true, cell: (each) => count(each.waiting) },
          { title: "Tokens/s", isNumber: true, cell: (each) => short(each.generated_tokens_per_s) },
          { title: "Busy", isNumber: true, cell: (each) => percent(each.busy) },
        ]}
      />
    </Panel>
  );
}

function CacheUse({ engine }: { engine: Engine }) {
  if (!engine.blocks?.total) return <span class="soft">not known</span>;
  const share = engine.blocks.reserved / engine.blocks.total;
  return (
    <span class="meter-cell">
      <Meter label={`KV cache of ${engine.model}`} share={share} tone={share > 0.95 ? "warning" : "info"} />
      <span class="soft small nowrap">{percent(share)}</span>
    </span>
  );
}

function Warnings({ warnings }: { warnings: Warning[] }) {
  const last = warnings.slice(-NUM_WARNINGS).reverse();
  return (
    <Panel title="Last warnings" actions={<a href={linkTo("log")}>All warnings</a>}>
      {last.length === 0 && <p class="soft">The log has no warnings.</p>}
      <ul class="lines">
        {last.map((each) => (
          <li key={`${each.time} ${each.message}`}>
            <time class="soft mono">{clock(each.time)}</time>
            <Badge tone={LOG_TONES[each.level] ?? "plain"}>{each.level.toLowerCase()}</Badge>
            <span>{each.message}</span>
          </li>
        ))}
      </ul>
    </Panel>
  );
}

export const page: Page = {
  name: "overview",
  title: "Overview",
  icon: "overview",
  section: "Operate",
  isForAdmins: true,
  view: Overview,
};
