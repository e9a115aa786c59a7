// Where the time of the last requests went.
import { useEffect } from "preact/hooks";
import { useFetched } from "../../api/use";
import { Button } from "../../ui/button";
import { Copy } from "../../ui/copy";
import { clock, milliseconds } from "../../ui/format";
import { Badge, Empty, Figure, Head, Notice, Panel } from "../../ui/layout";
import { Table } from "../../ui/table";
import type { Page, PageProps } from "../page";
import type { Listed, Timeline } from "./timeline";
import "./timelines.css";
import { Waterfall } from "./waterfall";

const RELOAD_MS = 3000;

function Timelines({ words }: PageProps) {
  return words[0] ? <One id={words[0]} /> : <List />;
}

function List() {
  const { value, error, reload } = useFetched<{ data: Listed[] }>("/v1/requests?limit=100");
  useEffect(() => {
    const timer = setInterval(reload, RELOAD_MS);
    return () => clearInterval(timer);
  }, []);
  return (
    <>
      <Head title="Timelines" lead="Where the time of the last requests went, the newest first." />
      {error && <Notice tone="error">{error}</Notice>}
      <Panel>
        <Table
          caption="The last requests"
          rows={value?.data ?? []}
          keyOf={(each) => each.id}
          empty={
            <Empty icon="timelines" title={value ? "No request yet" : "Loading"}>
              <p>Requests to language models stand here once they have begun, the last 256 of them.</p>
            </Empty>
          }
          columns={[
            { title: "Begun", cell: (each) => <span class="nowrap">{clock(each.started_at)}</span> },
            { title: "Request", cell: (each) => <Name listed={each} /> },
            { title: "Model", cell: (each) => each.model },
            { title: "First token", isNumber: true, cell: (each) => milliseconds(each.time_to_first_token_ms) },
            { title: "Whole", isNumber: true, cell: (each) => (each.is_complete ? milliseconds(each.duration_ms) : <Badge>open</Badge>) },
          ]}
        />
      </Panel>
    </>
  );
}

function Name({ listed }: { listed: Listed }) {
  return (
    <span class="request-id">
      <a class="mono" href={`#/timelines/${encodeURIComponent(listed.id)}`}>
        {listed.id}
      </a>
    </span>
  );
}

function One({ id }: { id: string }) {
  const { value, error, reload } = useFetched<Timeline>(`/v1/requests/${encodeURIComponent(id)}/timeline`);
  return (
    <>
      <Head title="Timeline" lead={<span class="mono">{id}</span>}>
        <a href="#/timelines">All requests</a>
        <Button onClick={reload}>Load again</Button>
      </Head>
      {error && <Notice tone="error">{error}</Notice>}
      {value && <Drawing timeline={value} />}
    </>
  );
}

function Drawing({ timeline }: { timeline: Timeline }) {
  return (
    <>
      <Panel class="figures">
        <Figure label="Model" value={timeline.model} />
        <Figure label="Begun" value={clock(timeline.started_at)} />
        <Figure label="First token" value={milliseconds(timeline.time_to_first_token_ms)} />
        <Figure label="Whole" value={timeline.is_complete ? milliseconds(timeline.duration_ms) : "open"} />
      </Panel>
      <Panel title="Where the time went" actions={<Copy text={JSON.stringify(timeline, null, 2)} label="Copy the timeline as JSON" />}>
        <Waterfall timeline={timeline} />
        {timeline.num_dropped_spans > 0 && <p class="soft small">{timeline.num_dropped_spans} more spans were not kept.</p>}
        <p class="soft small">
          Dots are events, such as the first token. A bar's attributes show when the pointer rests on it. Trace{" "}
          <span class="mono">{timeline.trace_id}</span>
        </p>
      </Panel>
    </>
  );
}

export const page: Page = {
  name: "timelines",
  title: "Timelines",
  icon: "timelines",
  section: "Operate",
  isForAdmins: false,
  view: Timelines,
};
