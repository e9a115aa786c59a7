import { useRef, useState } from "preact/hooks";
import type { Alternative, Token } from "./answer";

interface TokensProps {
  label: string;
  tokens: Token[];
  isColored: boolean;
}

/** A text made of its tokens. Hovering, tapping or the arrow keys choose one, whose probabilities are shown. */
export function Tokens({ label, tokens, isColored }: TokensProps) {
  const [chosen, choose] = useState(-1);
  const box = useRef<HTMLDivElement>(null);
  const chosenToken = tokens[chosen];
  const point = (event: Event) => {
    const at = (event.target as HTMLElement).dataset.token;
    if (at !== undefined) choose(Number(at));
  };
  const move = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") choose(-1);
    if (step === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(tokens.length - 1, chosen + step)));
  };
  return (
    <div class="tokens" ref={box} onMouseLeave={() => choose(-1)} onFocusOut={() => choose(-1)}>
      <div
        class="tokens-text"
        role="group"
        aria-label={`${label}, ${tokens.length} tokens: arrow keys show the probability of each`}
        tabIndex={0}
        onMouseOver={point}
        onClick={point}
        onKeyDown={move}
      >
        {tokens.map((each, n) => (
          <span key={n} data-token={n} class={tokenClass(each, n === chosen, isColored)}>
            {each.text}
          </span>
        ))}
      </div>
      {chosenToken && <Probabilities token={chosenToken} place={placeOf(box.current, chosen)} />}
    </div>
  );
}

/** Colours are by steps of probability: above 90 %, 50 %, 20 %, 5 % and below. */
function tokenClass(token: Token, isChosen: boolean, isColored: boolean): string {
  const probability = Math.exp(token.logprob);
  const level = [0.05, 0.2, 0.5, 0.9].filter((each) => probability >= each).length;
  return `token${isColored ? ` token-${level}` : ""}${isChosen ? " token-chosen" : ""}`;
}

interface PopupPlace {
  left: number;
  top: number;
}

const POPUP_WIDTH = 260;
const POPUP_HEIGHT = 170;

/** Returns where the popup stands in the window: below the token, or above it where there is no room below. */
function placeOf(box: HTMLElement | null, chosen: number): PopupPlace {
  const span = box?.querySelector<HTMLElement>(`[data-token="${chosen}"]`);
  const rect = [...(span?.getClientRects() ?? [])].at(-1);
  if (!rect) return { left: 0, top: 0 };
  const isBelow = rect.bottom + POPUP_HEIGHT < innerHeight;
  const left = Math.max(8, Math.min(rect.left, innerWidth - POPUP_WIDTH - 8));
  return { left, top: isBelow ? rect.bottom + 4 : rect.top - POPUP_HEIGHT - 4 };
}

function Probabilities({ token, place }: { token: Token; place: PopupPlace }) {
  const rows = token.alternatives.some((each) => each.text === token.text)
    ? token.alternatives
    : [token, ...token.alternatives];
  return (
    <div class="token-popup" role="status" style={popupStyle(place)}>
      <table>
        <caption class="hidden">Probabilities in this place</caption>
        <tbody>
          {rows.map((each) => (
            <Row key={each.text} each={each} isChosen={each.text === token.text} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function popupStyle({ left, top }: PopupPlace) {
  return { left: `${left}px`, top: `${top}px`, width: `${POPUP_WIDTH}px`, maxHeight: `${POPUP_HEIGHT}px` };
}

function Row({ each, isChosen }: { each: Alternative; isChosen: boolean }) {
  const probability = Math.exp(each.logprob);
  return (
    <tr class={isChosen ? "chosen" : ""}>
      <th scope="row">
        <code>{visible(each.text)}</code>
      </th>
      <td class="token-bar">
        <span style={{ width: `${probability * 100}%` }} />
      </td>
      <td class="number">{formatProbability(probability)}</td>
      <td class="number">{each.logprob.toFixed(2)}</td>
    </tr>
  );
}

function visible(text: string): string {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(empty)";
}

function formatProbability(probability: number): string {
  return probability >= 0.0005 ? `${(probability * 100).toFixed(1)} %` : "< 0.1 %";
}
