import { useState } from "preact/hooks";
import { FailureNotice } from "../../playground/failure";
import { Button } from "../../ui/button";
import { confirm } from "../../ui/dialog";
import { Field } from "../../ui/field";
import { Panel } from "../../ui/layout";
import { ownerKey, setOwnerKey } from "./api";
import { choose, chosen, collection, collections, create, failure, refresh, removeCollection } from "./state";

/** Chooses a collection, creates one, deletes one. */
export function Collections() {
  const [isCreating, setCreating] = useState(false);
  const found = collections.value ?? [];
  return (
    <Panel
      title="Collection"
      actions={
        <Button isSmall icon="plus" aria-expanded={isCreating} onClick={() => setCreating(!isCreating)}>
          New collection
        </Button>
      }
    >
      {isCreating && <NewCollection onDone={() => setCreating(false)} />}
      {found.length > 0 && (
        <Field label="Collection" hint={describe()}>
          <select value={chosen.value} onChange={(event) => void choose((event.currentTarget as HTMLSelectElement).value)}>
            {found.map((each) => (
              <option key={each.name} value={each.name}>
                {each.name}
              </option>
            ))}
          </select>
        </Field>
      )}
      {collection.value?.is_protected && <OwnerKey />}
      {failure.value && <FailureNotice failure={failure.value} />}
      {collection.value && (
        <Button kind="danger" icon="trash" isSmall onClick={() => void deleteShown()}>
          Delete the collection
        </Button>
      )}
    </Panel>
  );
}

function describe(): string {
  const shown = collection.value;
  return shown ? `Documents: ${shown.num_documents}. Chunks: ${shown.num_chunks}. Encoder: ${shown.encoder}.` : "";
}

async function deleteShown(): Promise<void> {
  const text = `${chosen.value} goes with all its documents.`;
  if (await confirm("Delete the collection?", text, "Delete")) await removeCollection();
}

function OwnerKey() {
  return (
    <Field label="Owner key" hint="This collection is protected. The key is forgotten when the page is closed.">
      <input
        type="password"
        autocomplete="off"
        value={ownerKey(chosen.value)}
        onInput={(event) => setOwnerKey(chosen.value, event.currentTarget.value)}
        onChange={() => void refresh()}
      />
    </Field>
  );
}

function NewCollection({ onDone }: { onDone: () => void }) {
  const [name, setName] = useState("");
  const [key, setKey] = useState("");
  const submit = async (event: Event) => {
    event.preventDefault();
    if (await create(name, key)) onDone();
  };
  return (
    <form class="new-collection" onSubmit={(event) => void submit(event)}>
      <Field label="Name" hint="Letters, digits, '.', '_' and '-'.">
        <input type="text" autocomplete="off" value={name} onInput={(event) => setName(event.currentTarget.value)} />
      </Field>
      <Field label="Owner key (optional)" hint="Whoever has it may read and change the collection.">
        <input type="password" autocomplete="new-password" value={key} onInput={(event) => setKey(event.currentTarget.value)} />
      </Field>
      <Button kind="primary" type="submit">
        Create
      </Button>
    </form>
  );
}
