// The warnings of the server's log.
import { useState } from "preact/hooks";
import { sample } from "../../live/connection";
import type { Sample, Warning } from "../../live/sample";
import { LOG_TONES } from "../../live/words";
import { CopyAs } from "../../ui/copy";
import { Badge, Empty, Head, Panel } from "../../ui/layout";
import type { Page } from "../page";
import "./log.css";

const LEVELS = ["all", "errors"] as const;

function Log() {
  const [words, setWords] = useState("");
  const [level, setLevel] = useState<(typeof LEVELS)[number]>("all");
  const { warnings } = sample.value as Sample;
  const shown = warnings.filter((each) => isMatch(each, words, level === "errors")).reverse();
  return (
    <>
      <Head title="Log" lead="The last warnings and errors, the newest first.">
        <div class="segments" role="group" aria-label="Levels">
          {LEVELS.map((each) => (
            <button type="button" key={each} aria-pressed={level === each} onClick={() => setLevel(each)}>
              {each}
            </button>
          ))}
        </div>
        <input
          type="search"
          class="log-search"
          aria-label="Find lines"
          placeholder="Words or a request's id"
          value={words}
          onInput={(event) => setWords(event.currentTarget.value)}
        />
        <CopyAs
          forms={[
            { name: "text", text: () => shown.map(asLine).join("\n") },
            { name: "JSON", text: () => JSON.stringify(shown, null, 2) },
          ]}
        />
      </Head>
      <Panel>
        {!shown.length && (
          <Empty icon="log" title={warnings.length ? "No line matches" : "The log has no warnings"}>
            <p>Warnings and errors of the gateway and its engines stand here.</p>
          </Empty>
        )}
        <ul class="log">
          {shown.map((each) => (
            <Line key={`${each.time} ${each.message}`} line={each} />
          ))}
        </ul>
      </Panel>
    </>
  );
}

function isMatch(line: Warning, words: string, isError: boolean): boolean {
  if (isError && line.level === "WARNING") return false;
  return asLine(line).toLowerCase().includes(words.trim().toLowerCase());
}

function asLine(line: Warning): string {
  return `${asTime(line.time)} ${line.level} ${line.process} ${line.logger} [${line.request_id}] ${line.message}`;
}

function asTime(seconds: number): string {
  return new Date(seconds * 1000).toISOString().replace("T", " ").replace("Z", "");
}

function Line({ line }: { line: Warning }) {
  return (
    <li>
      <time class="mono soft" dateTime={new Date(line.time * 1000).toISOString()}>
        {new Date(line.time * 1000).toLocaleTimeString("en-GB")}
      </time>
      <Badge tone={LOG_TONES[line.level] ?? "plain"}>{line.level.toLowerCase()}</Badge>
      <div>
        <p>
          {line.message} {(line.repeated ?? 1) > 1 && <Badge tone="plain">{line.repeated} times</Badge>}
        </p>
        <p class="soft small mono">
          {line.process} · {line.logger}
          {line.request_id !== "-" && ` · ${line.request_id}`}
        </p>
      </div>
    </li>
  );
}

export const page: Page = {
  name: "log",
  title: "Log",
  icon: "log",
  section: "Operate",
  isForAdmins: true,
  view: Log,
};
