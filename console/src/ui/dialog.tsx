import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Button } from "./button";

interface Question {
  title: string;
  text: string;
  /** What the button says that does it. */
  action: string;
  answer: (isSure: boolean) => void;
}

const asked = signal<Question | null>(null);

/** Asks before something that cannot be undone. Returns whether the user is sure. */
export function confirm(title: string, text: string, action: string): Promise<boolean> {
  return new Promise((resolve) => (asked.value = { title, text, action, answer: resolve }));
}

/** The place where the questions of `confirm` stand. The shell has it once. */
export function Questions() {
  const box = useRef<HTMLDialogElement>(null);
  const question = asked.value;
  useEffect(() => {
    if (question) box.current?.showModal();
  }, [question]);
  const answer = (isSure: boolean) => {
    asked.value = null;
    question?.answer(isSure);
  };
  if (!question) return null;
  return (
    <dialog ref={box} aria-labelledby="question" onCancel={() => answer(false)}>
      <div class="dialog-body">
        <h2 id="question">{question.title}</h2>
        <p>{question.text}</p>
        <div class="row dialog-end">
          <Button onClick={() => answer(false)}>Cancel</Button>
          <Button kind="danger" onClick={() => answer(true)}>
            {question.action}
          </Button>
        </div>
      </div>
    </dialog>
  );
}
