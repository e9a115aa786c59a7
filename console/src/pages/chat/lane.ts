// One model's side of the conversation. Two of them compare models.
import { computed, signal } from "@preact/signals";
import { streamEvents } from "../../api/sse";
import { readFailure } from "../../playground/failure";
import { addChunk, copyAnswer, fail, finish, startAnswer, type Answer, type Chunk, type ToolCall } from "./answer";
import { buildBody, type Asked, type Turn } from "./request";

export class Lane {
  readonly model = signal("");
  readonly turns = signal<Turn[]>([]);
  readonly isBusy = signal(false);
  /** The calls of the last answer, which wait for their results. */
  readonly openCalls = computed<ToolCall[]>(() => {
    const last = this.turns.value.at(-1);
    return last?.kind === "answer" && !this.isBusy.value ? last.answer.calls : [];
  });
  private abort: AbortController | null = null;
  private frame = 0;

  /** Adds a turn, and asks the model for the next one. */
  async ask(turn: Turn, asked: Asked, system: string): Promise<void> {
    this.turns.value = [...this.turns.value, turn];
    await this.answer(asked, system);
  }

  /** Asks for the last answer again, in its place. */
  async repeat(asked: Asked, system: string): Promise<void> {
    if (this.turns.value.at(-1)?.kind === "answer") this.turns.value = this.turns.value.slice(0, -1);
    await this.answer(asked, system);
  }

  /** Ends the request: the server cancels it. What has come of the answer stays. */
  stop(): void {
    this.abort?.abort();
  }

  clear(): void {
    this.stop();
    this.turns.value = [];
  }

  private async answer(asked: Asked, system: string): Promise<void> {
    const body = buildBody(this.model.value, asked, system, this.turns.value);
    const answer = startAnswer(this.model.value, performance.now());
    this.turns.value = [...this.turns.value, { kind: "answer", answer }];
    const abort = new AbortController();
    this.abort = abort;
    this.isBusy.value = true;
    try {
      for await (const event of streamEvents("/v1/chat/completions", { body, signal: abort.signal })) {
        if (event.data === "[DONE]") continue;
        addChunk(answer, JSON.parse(event.data) as Chunk, performance.now());
        this.show(answer);
      }
      finish(answer);
    } catch (error) {
      if (abort.signal.aborted) answer.state = "stopped";
      else fail(answer, readFailure(error));
    } finally {
      this.isBusy.value = false;
      this.replace(answer);
    }
  }

  /** Shows an answer as it is now, once for all the chunks that come before the next frame. */
  private show(answer: Answer): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => this.replace(answer));
  }

  /** Gives the turn a new answer: what is the same object is not drawn again. */
  private replace(answer: Answer): void {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.turns.value = this.turns.value.map((turn) =>
      turn.kind === "answer" && turn.answer.askedAt === answer.askedAt ? { kind: "answer", answer: copyAnswer(answer) } : turn,
    );
  }
}
