import { useEffect } from "preact/hooks";
import "../../playground/playground.css";
import "./chat.css";
import { chatModels, loadModels, modelsFault } from "../../playground/models";
import { loadPlace } from "../../playground/place";
import { Button } from "../../ui/button";
import { Switch } from "../../ui/field";
import { Empty, Head, Notice, Panel } from "../../ui/layout";
import type { Page } from "../page";
import { Composer } from "./composer";
import { LaneView } from "./lane_view";
import { SettingsView } from "./settings_view";
import { chooseModels, clear, isComparing, lanes } from "./state";

function Chat() {
  const names = chatModels.value;
  useEffect(() => {
    void loadModels();
    void loadPlace();
  }, []);
  useEffect(() => chooseModels(names ?? []), [names]);
  return (
    <>
      <Head title="Chat" lead="Talk to any language model or pipeline of this server.">
        <Switch label="Compare two models" isOn={isComparing.value} onChange={(isOn) => (isComparing.value = isOn)} />
        <Button icon="trash" onClick={clear}>
          New conversation
        </Button>
      </Head>
      {modelsFault.value && <Notice tone="error">{modelsFault.value}</Notice>}
      {names?.length === 0 && <Empty icon="models" title="This server has no language model." />}
      {names && names.length > 0 && (
        <div class="playground">
          <div>
            <div class={`lanes lanes-${lanes.value.length}`}>
              {lanes.value.map((each, n) => (
                <LaneView key={n} lane={each} number={n + 1} />
              ))}
            </div>
            <Composer />
          </div>
          <Panel title="Settings">
            <SettingsView />
          </Panel>
        </div>
      )}
    </>
  );
}

export const page: Page = {
  name: "chat",
  title: "Chat",
  icon: "chat",
  section: "Playground",
  isForAdmins: false,
  view: Chat,
};
