import { useState } from "preact/hooks";
import { FailureNotice } from "../../playground/failure";
import { FileButton } from "../../playground/file_button";
import { Button } from "../../ui/button";
import { CopyAs } from "../../ui/copy";
import { confirm } from "../../ui/dialog";
import { Badge, Empty, Meter, Panel } from "../../ui/layout";
import { Table } from "../../ui/table";
import type { DocumentInfo } from "./api";
import { uploadCurl, uploadSluice } from "./snippets";
import { chosen, documents, hasMore, loadMore, ragPlace, refresh, removeDocument } from "./state";
import { ENDINGS, isOpen, uploadAll, uploads, type Upload } from "./upload";

/** The documents of the collection, and where files are dropped to add some. */
export function Documents() {
  return (
    <Panel title="Documents" actions={<CopyAs label="Copy upload as" forms={copyForms()} />}>
      <DropZone />
      <Uploads />
      <Table
        caption="Documents of the collection"
        columns={[
          { title: "Document", cell: (row: DocumentInfo) => <Name row={row} /> },
          { title: "Chunks", cell: (row) => row.num_chunks, isNumber: true },
          { title: "Delete", cell: (row) => <Delete id={row.id} /> },
        ]}
        rows={documents.value}
        keyOf={(row) => row.id}
        empty={<Empty icon="documents" title="No documents are listed." />}
      />
      {hasMore.value && (
        <Button isSmall onClick={() => void loadMore()}>
          More documents
        </Button>
      )}
    </Panel>
  );
}

function copyForms() {
  const name = uploads.value[0]?.name ?? "handbook.md";
  return [
    { name: "curl", text: () => uploadCurl(ragPlace(), name) },
    { name: "sluice", text: () => uploadSluice(ragPlace(), name) },
  ];
}

function Name({ row }: { row: DocumentInfo }) {
  return (
    <span class="document-name">
      {row.id} <span class="field-hint">{row.format}</span>
    </span>
  );
}

function Delete({ id }: { id: string }) {
  const remove = async () => {
    if (await confirm("Delete the document?", `Later answers do not use ${id}.`, "Delete")) await removeDocument(id);
  };
  return <Button kind="quiet" icon="trash" isSmall label={`Delete ${id}`} onClick={() => void remove()} />;
}

function DropZone() {
  const [isOver, setOver] = useState(false);
  const add = (files: File[]) => void uploadAll(chosen.value, files, () => void refresh());
  const drop = (event: DragEvent) => {
    event.preventDefault();
    setOver(false);
    add([...(event.dataTransfer?.files ?? [])]);
  };
  const drag = (event: DragEvent) => {
    event.preventDefault();
    setOver(true);
  };
  return (
    <div class={`drop ${isOver ? "drop-over" : ""}`} onDragOver={drag} onDragLeave={() => setOver(false)} onDrop={drop}>
      <p>Drop files here: Markdown, HTML, PDF, text or JSON lines.</p>
      <FileButton label="Choose files" accept={ENDINGS.join(",")} isMultiple disabled={!chosen.value} onFiles={add} />
    </div>
  );
}

/** What came of the files: a bar for each, and one for all of them. */
function Uploads() {
  const all = uploads.value;
  if (!all.length) return null;
  const numDone = all.filter((each) => !isOpen(each)).length;
  const share = all.reduce((sum, each) => sum + (isOpen(each) ? each.sent * 0.5 : 1), 0) / all.length;
  return (
    <div class="uploads">
      <div class="row">
        <span>
          {numDone} of {all.length} files
        </span>
        <Meter label="All files" share={share} tone={numDone === all.length ? "good" : "info"} />
      </div>
      <ul aria-label="Uploads">
        {all.map((each) => (
          <UploadRow key={each.id} upload={each} />
        ))}
      </ul>
    </div>
  );
}

const TONES = { created: "good", updated: "good", unchanged: "plain", failed: "error" } as const;

function UploadRow({ upload }: { upload: Upload }) {
  const { state } = upload;
  return (
    <li>
      <div class="row">
        <span class="upload-name">{upload.name}</span>
        {upload.note && <span>{upload.note}</span>}
        {state in TONES ? <Badge tone={TONES[state as keyof typeof TONES]}>{state}</Badge> : <span>{state} …</span>}
      </div>
      {state === "sending" && <Meter label={`Sent of ${upload.name}`} share={upload.sent} />}
      {state === "encoding" && <progress aria-label={`${upload.name} is being encoded`} />}
      {upload.failure && <FailureNotice failure={upload.failure} />}
    </li>
  );
}
