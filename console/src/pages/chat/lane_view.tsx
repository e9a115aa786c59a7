import { useEffect, useRef, useState } from "preact/hooks";
import { chatModels, loadAbilities } from "../../playground/models";
import { ModelSelect } from "../../playground/model_select";
import { Button } from "../../ui/button";
import { CopyAs } from "../../ui/copy";
import { Field } from "../../ui/field";
import { Empty } from "../../ui/layout";
import { findPlace } from "../../playground/place";
import { AnswerView } from "./answer_view";
import type { Lane } from "./lane";
import { buildBody, type Turn } from "./request";
import { chatCurl, chatGrpc, chatPython } from "./snippets";
import { askedOf, draft, draftTurn, images, isColored, lanes, settings } from "./state";

/** One side of the conversation: its model, its turns, and what its tools are to return. */
export function LaneView({ lane, number }: { lane: Lane; number: number }) {
  const turns = lane.turns.value;
  useEffect(() => void loadAbilities(lane.model.value), [lane.model.value]);
  const name = lanes.value.length > 1 ? `Model ${number}` : "Model";
  return (
    <section class="lane" aria-label={name}>
      <div class="lane-head">
        <ModelSelect
          label={name}
          names={chatModels.value ?? []}
          value={lane.model.value}
          onChange={(chosen) => (lane.model.value = chosen)}
        />
        <CopyAs label="Copy as" forms={copyForms(lane)} />
      </div>
      {turns.length ? <Turns lane={lane} turns={turns} /> : <Empty icon="chat" title="Write a message to begin." />}
      <Results lane={lane} />
    </section>
  );
}

/** What is copied is the request that Send would make; with nothing written, the last one that was made. */
function copyForms(lane: Lane) {
  const body = () => {
    const turns = lane.turns.value;
    const hasDraft = draft.value.trim() || images.value.length;
    const past = turns.at(-1)?.kind === "answer" ? turns.slice(0, -1) : turns;
    return buildBody(lane.model.value, askedOf(lane), settings.value.system, hasDraft ? [...turns, draftTurn()] : past);
  };
  const place = findPlace();
  return [
    { name: "curl", text: () => chatCurl(place, body()) },
    { name: "Python (openai)", text: () => chatPython(place, body()) },
    ...(place.grpc ? [{ name: "Python (gRPC)", text: () => chatGrpc(place, body()) }] : []),
  ];
}

function Turns({ lane, turns }: { lane: Lane; turns: Turn[] }) {
  const box = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  const numShown = useRef(0);
  useEffect(() => {
    const isNew = turns.length > numShown.current;
    numShown.current = turns.length;
    if ((isNew || isAtEnd.current) && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [turns]);
  const note = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current ?? { scrollTop: 0, scrollHeight: 0, clientHeight: 0 };
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < 40;
  };
  const isRepeatable = !lane.isBusy.value && turns.at(-1)?.kind === "answer";
  return (
    <div class="turns" ref={box} onScroll={note} tabIndex={0} role="log" aria-label="Conversation">
      {turns.map((turn, n) => (
        <TurnView key={n} turn={turn} />
      ))}
      {isRepeatable && (
        <Button kind="quiet" icon="refresh" isSmall onClick={() => void lane.repeat(askedOf(lane), settings.value.system)}>
          Answer again
        </Button>
      )}
    </div>
  );
}

function TurnView({ turn }: { turn: Turn }) {
  if (turn.kind === "answer") return <AnswerView answer={turn.answer} isColored={isColored.value} />;
  if (turn.kind === "user") {
    return (
      <article class="message message-user" aria-label="Your message">
        {turn.images.map((url, n) => (
          <img key={url} src={url} alt={`Image ${n + 1} of the message`} />
        ))}
        <div class="message-text">{turn.text}</div>
      </article>
    );
  }
  return (
    <article class="message message-user" aria-label="Results of tools">
      {turn.results.map(({ call, content }) => (
        <div key={call.id}>
          <p>
            <code>{call.name}</code> returned
          </p>
          <pre tabIndex={0} aria-label={`Result of ${call.name}`}>
            {content}
          </pre>
        </div>
      ))}
    </article>
  );
}

/** Where the user says what the called tools returned, so that the model can go on. */
function Results({ lane }: { lane: Lane }) {
  const calls = lane.openCalls.value;
  const [contents, setContents] = useState<Record<string, string>>({});
  if (!calls.length) return null;
  const results = calls.map((call) => ({ call, content: contents[call.id] ?? "" }));
  return (
    <form class="results" onSubmit={(event) => event.preventDefault()}>
      {results.map(({ call, content }) => (
        <Field key={call.id} label={`Result of ${call.name}`} hint="What the tool returns: text or JSON.">
          <textarea
            rows={2}
            class="code"
            value={content}
            onInput={(event) => setContents({ ...contents, [call.id]: event.currentTarget.value })}
          />
        </Field>
      ))}
      <Button
        kind="primary"
        icon="play"
        onClick={() => void lane.ask({ kind: "results", results }, askedOf(lane), settings.value.system)}
      >
        Send the results
      </Button>
    </form>
  );
}
