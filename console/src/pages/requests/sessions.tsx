import { sample } from "../../live/connection";
import type { Sample, Session } from "../../live/sample";
import { count, duration, percent } from "../../ui/format";
import { Empty, Panel } from "../../ui/layout";
import { Table } from "../../ui/table";

/** The sessions that sent a request last, with what they used and why tokens of theirs were computed again. */
export function Sessions({ words }: { words: string }) {
  const { sessions } = sample.value as Sample;
  const shown = sessions.filter((each) => isMatch(each, words));
  return (
    <Panel title="Sessions">
      <Table
        caption="Sessions"
        rows={shown}
        keyOf={(each) => `${each.tenant}\0${each.name}`}
        empty={
          <Empty icon="requests" title={sessions.length ? "No session matches" : "No session has been seen yet"}>
            <p>Agent programs and chats that name their session in a header or a field stand here.</p>
          </Empty>
        }
        columns={[
          { title: "Session", cell: (each) => <Name session={each} /> },
          { title: "Tenant", cell: (each) => each.tenant || <span class="soft">none</span> },
          { title: "Model", cell: (each) => each.model },
          { title: "Turns", isNumber: true, cell: (each) => count(each.num_turns) },
          { title: "Prompts", isNumber: true, cell: (each) => count(each.prompt_tokens) },
          { title: "Answers", isNumber: true, cell: (each) => count(each.generated_tokens) },
          { title: "Cached", isNumber: true, cell: (each) => percent(each.cached_tokens / (each.prompt_tokens || 1)) },
          { title: "Computed again", cell: (each) => <Miss session={each} /> },
          { title: "Seen", isNumber: true, cell: (each) => <span class="nowrap">{duration(each.seen_s)} ago</span> },
        ]}
      />
    </Panel>
  );
}

function isMatch(session: Session, words: string): boolean {
  const text = [session.name, session.parent, session.tenant, session.model, session.miss];
  return text.join(" ").toLowerCase().includes(words.trim().toLowerCase());
}

function Name({ session }: { session: Session }) {
  return (
    <span class="session-name">
      <span class="mono" title={session.name}>
        {session.name}
      </span>
      {session.parent && <span class="soft small">of {session.parent}</span>}
    </span>
  );
}

function Miss({ session }: { session: Session }) {
  if (!session.miss) return <span class="soft">nothing</span>;
  return (
    <span>
      {session.missed_tokens > 0 && `${count(session.missed_tokens)}: `}
      <span class="soft">{session.miss}</span>
    </span>
  );
}
