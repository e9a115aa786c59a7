import { sample } from "../../live/connection";
import { Figure, Head, Panel } from "../../ui/layout";
import type { Page } from "../page";

function Overview() {
  const now = sample.value;
  if (!now) return null;
  return (
    <>
      <Head title="Overview" />
      <Panel>
        <Figure label="Generated" value={Math.round(now.throughput.generated_tokens_per_s)} unit="tokens/s" />
      </Panel>
    </>
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
