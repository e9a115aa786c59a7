// The open generations, and the end of one.
import { useState } from "preact/hooks";
import { send } from "../../api/client";
import { sample } from "../../live/connection";
import type { Sample, Sequence } from "../../live/sample";
import { Button } from "../../ui/button";
import { Copy } from "../../ui/copy";
import { confirm } from "../../ui/dialog";
import { count, duration } from "../../ui/format";
import { Badge, Empty, Head, Panel } from "../../ui/layout";
import { Table } from "../../ui/table";
import { toast } from "../../ui/toast";
import type { Page } from "../page";
import { Progress } from "./progress";
import { Sessions } from "./sessions";
import "./requests.css";

function Requests() {
  const [words, setWords] = useState("");
  const { sequences } = sample.value as Sample;
  const shown = sequences.items.filter((each) => isMatch(each, words));
  return (
    <>
      <Head title="Requests" lead="Generations that are open now, those with tokens first.">
        <input
          type="search"
          aria-label="Find requests"
          placeholder="Model, tenant, session or id"
          value={words}
          onInput={(event) => setWords(event.currentTarget.value)}
        />
      </Head>
      <Panel>
        <Table
          caption="Open generations"
          rows={shown}
          keyOf={(each) => each.id}
          empty={
            <Empty icon="requests" title={sequences.total ? "No open request matches" : "No request is open"}>
              <p>Requests to language models stand here from their arrival to their last token.</p>
            </Empty>
          }
          columns={[
            { title: "Request", cell: (each) => <Id sequence={each} /> },
            { title: "State", cell: (each) => <State sequence={each} /> },
            { title: "Model", cell: (each) => <ModelName sequence={each} /> },
            { title: "Tenant", cell: (each) => each.tenant || <span class="soft">none</span> },
            { title: "Prompt", isNumber: true, cell: (each) => count(each.prompt_tokens) },
            { title: "Tokens", cell: (each) => <Progress sequence={each} isBare /> },
            { title: "Age", isNumber: true, cell: (each) => <span class="nowrap">{duration(each.age_s)}</span> },
            { title: "Actions", cell: (each) => <Cancel sequence={each} /> },
          ]}
        />
        {sequences.total > sequences.items.length && (
          <p class="soft small">
            {count(sequences.items.length)} of {count(sequences.total)} open generations are shown.
          </p>
        )}
      </Panel>
      <Sessions words={words} />
    </>
  );
}

function isMatch(sequence: Sequence, words: string): boolean {
  const text = [sequence.model, sequence.adapter, sequence.tenant, sequence.request_id, sequence.id, sequence.replica];
  return text.join(" ").toLowerCase().includes(words.trim().toLowerCase());
}

function Id({ sequence }: { sequence: Sequence }) {
  return (
    <span class="request-id">
      <span class="mono" title={sequence.request_id}>
        {sequence.request_id}
      </span>
      <Copy text={sequence.request_id} label={`Copy the id ${sequence.request_id}`} />
    </span>
  );
}

function State({ sequence }: { sequence: Sequence }) {
  return (
    <span class="row">
      <Badge tone={sequence.state === "running" ? "good" : "warning"}>{sequence.state}</Badge>
      {sequence.priority !== 0 && <span class="soft small">priority {sequence.priority}</span>}
    </span>
  );
}

function ModelName({ sequence }: { sequence: Sequence }) {
  const more = [sequence.adapter, sequence.replica && `replica ${sequence.replica}`].filter(Boolean).join(" · ");
  return (
    <>
      {sequence.model}
      {more && <div class="soft small">{more}</div>}
    </>
  );
}

function Cancel({ sequence }: { sequence: Sequence }) {
  const [isBusy, setBusy] = useState(false);
  const cancel = async () => {
    const text = `Its client gets an error, after ${count(sequence.generated_tokens)} tokens.`;
    if (!(await confirm(`Cancel request ${sequence.request_id}?`, text, "Cancel the request"))) return;
    setBusy(true);
    try {
      await send(`/v1/admin/requests/${sequence.id}/cancel`, { method: "POST" });
      toast(`Request ${sequence.request_id} is cancelled.`, "good");
    } catch (error) {
      toast((error as Error).message, "error");
    }
    setBusy(false);
  };
  return (
    <Button kind="danger" isSmall isBusy={isBusy} aria-label={`Cancel ${sequence.request_id}`} onClick={() => void cancel()}>
      Cancel
    </Button>
  );
}

export const page: Page = {
  name: "requests",
  title: "Requests",
  icon: "requests",
  section: "Operate",
  isForAdmins: true,
  view: Requests,
};
