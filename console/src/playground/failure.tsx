import { ApiError } from "../api/client";
import { Notice } from "../ui/layout";

export interface Failure {
  message: string;
  /** The field of the request that it is about; "" where there is none. */
  field: string;
  code: string;
}

/** Returns what is known of a failed request. */
export function readFailure(error: unknown): Failure {
  if (error instanceof ApiError) return { message: error.message, field: error.param, code: error.code };
  return { message: (error as Error).message, field: "", code: "" };
}

/** Shows a refusal or a failure in the words of the server, with the field that it names. */
export function FailureNotice({ failure }: { failure: Failure }) {
  return (
    <Notice tone="error">
      {failure.message}
      {failure.field && (
        <p class="failure-field">
          Field: <code>{failure.field}</code>
        </p>
      )}
    </Notice>
  );
}
