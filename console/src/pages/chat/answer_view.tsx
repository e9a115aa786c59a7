import { FailureNotice } from "../../playground/failure";
import { prettyJson } from "../../playground/json";
import { Copy } from "../../ui/copy";
import { Badge } from "../../ui/layout";
import { readTiming, type Answer, type Token, type ToolCall } from "./answer";
import { Tokens } from "./tokens";

export interface AnswerViewProps {
  answer: Answer;
  isColored: boolean;
}

/** What a model answered: its reasoning, folded; its text; the tools that it calls; what it took. */
export function AnswerView({ answer, isColored }: AnswerViewProps) {
  const isOpen = answer.state === "waiting" || answer.state === "streaming";
  return (
    <article class="message message-answer" aria-label={`Answer of ${answer.model}`} aria-busy={isOpen}>
      <header class="message-head">
        <strong>{answer.model}</strong>
        <Copy text={answer.text || prettyJson(JSON.stringify(answer.calls))} label="Copy the answer" />
      </header>
      {answer.reasoning && (
        <details class="reasoning">
          <summary>Reasoning ({answer.usage?.completion_tokens_details?.reasoning_tokens ?? "…"} tokens)</summary>
          <Text label="Reasoning" text={answer.reasoning} tokens={answer.reasoningTokens} isColored={isColored} />
        </details>
      )}
      {answer.state === "waiting" && <p class="waiting">Waiting for the first token …</p>}
      {answer.text && <Text label="Answer" text={answer.text} tokens={answer.tokens} isColored={isColored} />}
      {answer.calls.map((call) => (
        <CallView key={call.id} call={call} />
      ))}
      {answer.sources.length > 0 && <Sources answer={answer} />}
      {answer.failure && <FailureNotice failure={answer.failure} />}
      {!isOpen && <Summary answer={answer} />}
    </article>
  );
}

interface TextProps {
  label: string;
  text: string;
  tokens: Token[];
  isColored: boolean;
}

function Text({ label, text, tokens, isColored }: TextProps) {
  if (tokens.length) return <Tokens label={label} tokens={tokens} isColored={isColored} />;
  return <div class="message-text">{text}</div>;
}

function CallView({ call }: { call: ToolCall }) {
  return (
    <div class="tool-call">
      <p>
        calls <code>{call.name}</code>
      </p>
      <pre tabIndex={0} aria-label={`Arguments of ${call.name}`}>
        {prettyJson(call.args)}
      </pre>
    </div>
  );
}

function Sources({ answer }: { answer: Answer }) {
  return (
    <details>
      <summary>Sources ({answer.sources.length})</summary>
      <ol>
        {answer.sources.map((each, n) => (
          <li key={n}>
            {each.document} {each.heading && `– ${each.heading}`}
          </li>
        ))}
      </ol>
    </details>
  );
}

/** One line: why the answer ended, its counts, and its speed as the browser saw it. */
function Summary({ answer }: { answer: Answer }) {
  const timing = readTiming(answer);
  const { usage } = answer;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  return (
    <footer class="message-summary">
      <Ending answer={answer} />
      {usage && (
        <span>
          {usage.prompt_tokens} prompt{cached > 0 && ` (${cached} cached)`} + {usage.completion_tokens} generated tokens
        </span>
      )}
      {timing && <span>TTFT {Math.round(timing.ttftMs)} ms</span>}
      {timing?.tokensPerS && <span>{timing.tokensPerS.toFixed(1)} tokens/s</span>}
      {timing && <span>{(timing.totalMs / 1000).toFixed(2)} s</span>}
    </footer>
  );
}

function Ending({ answer }: { answer: Answer }) {
  if (answer.state === "stopped") return <Badge tone="warning">stopped</Badge>;
  if (answer.state === "failed") return <Badge tone="error">failed</Badge>;
  return <Badge tone={answer.finish === "length" ? "warning" : "plain"}>{answer.finish}</Badge>;
}
