import { send } from "../../api/client";
import { apiKey } from "../../api/key";
import { useFetched } from "../../api/use";
import type { Quota } from "../../live/sample";
import { Button } from "../../ui/button";
import { confirm } from "../../ui/dialog";
import { Badge, Empty, Panel } from "../../ui/layout";
import { Table } from "../../ui/table";
import { toast } from "../../ui/toast";
import { Quotas } from "./index";

interface Key {
  id: string;
  name: string;
  state: "active" | "expired" | "revoked";
  tenant: string;
  models: string[];
  groups: string[];
  limits: Record<string, number>;
  expires_at: number | null;
}

const LIST = "/v1/admin/keys";

interface KeysProps {
  used: { name: string; quotas: Quota[] }[];
}

/** The keys of the server's store, with what is used of their limits. */
export function Keys({ used }: KeysProps) {
  return <Panel title="Keys">{apiKey.value ? <KeyTable used={used} /> : <NoKeys />}</Panel>;
}

/** Whoever came first would own a server that asks nobody for a key, so it lists and makes none over the network. */
function NoKeys() {
  return (
    <Empty icon="key" title="This server asks for no key">
      <p>
        Once there is a key, every request needs one. The first is made on the server's own machine:{" "}
        <code>sluice keys create --name admin</code>
      </p>
    </Empty>
  );
}

function KeyTable({ used }: KeysProps) {
  const { value, error, reload } = useFetched<{ data: Key[] }>(LIST);
  const quotas = (key: Key) => used.find((each) => each.name === key.name)?.quotas ?? unusedQuotas(key);
  const revoke = async (key: Key) => {
    const text = "Requests with it are refused from now on. This cannot be taken back.";
    if (!(await confirm(`Revoke the key ${key.name}?`, text, "Revoke"))) return;
    try {
      await send(`${LIST}/${encodeURIComponent(key.id)}`, { method: "DELETE" });
      toast(`The key ${key.name} is revoked.`, "good");
    } catch (problem) {
      toast((problem as Error).message, "error");
    }
    reload();
  };
  if (error) {
    return (
      <Empty icon="key" title="There is no list of keys">
        <p>{error}</p>
      </Empty>
    );
  }
  return (
    <Table
      caption="Keys"
      rows={value?.data ?? []}
      keyOf={(each) => each.id}
      empty={
        <Empty icon="key" title={value ? "The store has no keys" : "Reading the keys"}>
          <p>
            Keys of <code>sluice keys</code> stand here, not the one of <code>--api-key</code>.
          </p>
        </Empty>
      }
      columns={[
        { title: "Key", cell: (each) => <Name of={each} /> },
        { title: "Tenant", cell: (each) => each.tenant || <span class="soft">none</span> },
        { title: "Models", cell: (each) => each.models.join(", ") },
        { title: "Rights", cell: (each) => <span class="small">{each.groups.join(", ")}</span> },
        { title: "Ends", cell: (each) => <End of={each} /> },
        { title: "Quotas", cell: (each) => <Quotas name={each.name} quotas={quotas(each)} /> },
        {
          title: "Actions",
          cell: (each) => (
            <Button kind="danger" isSmall aria-label={`Revoke ${each.name}`} onClick={() => void revoke(each)}>
              Revoke
            </Button>
          ),
        },
      ]}
    />
  );
}

function unusedQuotas(key: Key): Quota[] {
  return Object.entries(key.limits)
    .filter(([limit]) => limit !== "cached_token_rate")
    .map(([limit, most]) => ({ limit, used: 0, most, ratio: 0 }));
}

function Name({ of: key }: { of: Key }) {
  return (
    <span class="row">
      {key.name}
      {key.state !== "active" && <Badge tone="warning">{key.state}</Badge>}
    </span>
  );
}

function End({ of: key }: { of: Key }) {
  if (key.expires_at === null) return <span class="soft">never</span>;
  return <span class="nowrap">{new Date(key.expires_at * 1000).toISOString().slice(0, 10)}</span>;
}
