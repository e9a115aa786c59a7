// Who uses the server, how much of their quotas is used, and the keys.
import { sample } from "../../live/connection";
import type { Quota, Sample } from "../../live/sample";
import { count, percent, short } from "../../ui/format";
import { Empty, Head, Meter, Panel } from "../../ui/layout";
import { Table } from "../../ui/table";
import type { Page } from "../page";
import { Keys } from "./keys";
import "./tenants.css";

function Tenants() {
  const { tenants } = sample.value as Sample;
  return (
    <>
      <Head title="Tenants and quotas" lead="Who uses the server now, and what is left of what they may use." />
      <Panel title="Tenants">
        <Table
          caption="Tenants"
          rows={tenants}
          keyOf={(each) => each.name}
          empty={
            <Empty icon="tenants" title="No tenant has been seen yet">
              <p>A tenant stands here once a request has used its key.</p>
            </Empty>
          }
          columns={[
            { title: "Tenant", cell: (each) => each.name || <span class="soft">requests without a tenant</span> },
            { title: "Running", isNumber: true, cell: (each) => count(each.running) },
            { title: "Waiting", isNumber: true, cell: (each) => count(each.waiting) },
            { title: "Prompts/s", isNumber: true, cell: (each) => short(each.prompt_tokens_per_s) },
            { title: "Tokens/s", isNumber: true, cell: (each) => short(each.generated_tokens_per_s) },
            { title: "Quotas", cell: (each) => <Quotas name={each.name} quotas={each.quotas} /> },
          ]}
        />
      </Panel>
      <Keys used={(sample.value as Sample).keys} />
    </>
  );
}

/** What is used of the limits of a tenant or a key. */
export function Quotas({ name, quotas }: { name: string; quotas: Quota[] }) {
  if (!quotas.length) return <span class="soft">no limits</span>;
  return (
    <div class="quotas">
      {quotas.map((each) => (
        <div key={each.limit}>
          <div class="progress-line">
            <span class="soft">{each.limit.replaceAll("_", " ")}</span>
            <span class="nowrap">
              {short(each.used)} <span class="soft">of {short(each.most)}</span> · {percent(each.ratio)}
            </span>
          </div>
          <Meter label={`${each.limit} of ${name}`} share={each.ratio} tone={toneOf(each.ratio)} />
        </div>
      ))}
    </div>
  );
}

function toneOf(ratio: number): "info" | "warning" | "error" {
  return ratio >= 1 ? "error" : ratio >= 0.9 ? "warning" : "info";
}

export const page: Page = {
  name: "tenants",
  title: "Tenants",
  icon: "tenants",
  section: "Operate",
  isForAdmins: true,
  view: Tenants,
};
