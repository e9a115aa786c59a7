import { useState } from "preact/hooks";
import { Button } from "../../ui/button";
import { CopyAs } from "../../ui/copy";
import { Field } from "../../ui/field";
import { Empty, Notice, Panel } from "../../ui/layout";
import { AnswerView } from "./answer_view";
import { answers, ask, buildQuery, clearAnswers, isBusy, options, stop, type Options } from "./question";
import { queryCurl, queryGrpc, queryPython } from "./snippets";
import { chosen, ragPlace } from "./state";

/** Asks questions of the chosen collection. */
export function Ask() {
  const [question, setQuestion] = useState("");
  const query = buildQuery(question, answers.value);
  const canAsk = Boolean(question.trim()) && !query.fault && !isBusy.value && Boolean(chosen.value);
  const submit = () => {
    if (!canAsk) return;
    setQuestion("");
    void ask(chosen.value, question);
  };
  const keys = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  };
  return (
    <Panel
      title="Ask"
      actions={
        <>
          <CopyAs forms={copyForms(question)} />
          <Button isSmall icon="trash" onClick={clearAnswers}>
            New conversation
          </Button>
        </>
      }
    >
      <div class="rag-answers" role="log" aria-label="Answers">
        {answers.value.map((each) => (
          <AnswerView key={each.id} answer={each} />
        ))}
        {!answers.value.length && <Empty icon="documents" title="Ask a question that the documents answer." />}
      </div>
      <Field label="Question" hint="Enter asks; Shift + Enter begins a line. Earlier answers are the context of the next.">
        <textarea rows={2} value={question} onInput={(event) => setQuestion(event.currentTarget.value)} onKeyDown={keys} />
      </Field>
      {query.fault && <Notice tone="error">{query.fault}</Notice>}
      <div class="row">
        {isBusy.value ? (
          <Button kind="danger" icon="stop" onClick={stop}>
            Stop
          </Button>
        ) : (
          <Button kind="primary" icon="play" disabled={!canAsk} onClick={submit}>
            Ask
          </Button>
        )}
      </div>
      <OptionsView />
    </Panel>
  );
}

/** What is copied is the question that is written; with nothing written, the last one that was asked. */
function copyForms(question: string) {
  const fields = () => {
    const last = answers.value.at(-1);
    const isWritten = Boolean(question.trim()) || !last;
    return isWritten
      ? buildQuery(question || "What is this about?", answers.value).fields
      : buildQuery(last.question, answers.value.slice(0, -1)).fields;
  };
  const place = ragPlace();
  return [
    { name: "curl", text: () => queryCurl(place, fields()) },
    { name: "Python (openai)", text: () => queryPython(place, fields()) },
    ...(place.grpc ? [{ name: "Python (gRPC)", text: () => queryGrpc(place, fields()) }] : []),
  ];
}

function OptionsView() {
  const set = (some: Partial<Options>) => (options.value = { ...options.value, ...some });
  const line = (name: "topK" | "maxTokens" | "model", label: string, placeholder: string) => (
    <Field label={label}>
      <input
        type="text"
        autocomplete="off"
        placeholder={placeholder}
        value={options.value[name]}
        onInput={(event) => set({ [name]: event.currentTarget.value })}
      />
    </Field>
  );
  return (
    <details>
      <summary>Options</summary>
      <div class="settings-grid">
        {line("topK", "top_k", "default")}
        {line("maxTokens", "max_tokens", "default")}
        <Field label="mode">
          <select value={options.value.mode} onChange={(event) => set({ mode: (event.currentTarget as HTMLSelectElement).value as Options["mode"] })}>
            <option value="">default</option>
            <option value="vector">by meaning (vector)</option>
            <option value="bm25">by words (bm25)</option>
            <option value="hybrid">by both (hybrid)</option>
          </select>
        </Field>
        {line("model", "model", "rag_pipeline")}
      </div>
      <Field label="filter" hint='JSON conditions on metadata: {"year": {"gte": 2025}}'>
        <textarea rows={2} class="code" value={options.value.filter} onInput={(event) => set({ filter: event.currentTarget.value })} />
      </Field>
    </details>
  );
}
