import { useEffect } from "preact/hooks";
import "../../playground/playground.css";
import "./rag.css";
import { loadPlace } from "../../playground/place";
import { Empty, Head } from "../../ui/layout";
import type { Page } from "../page";
import { Ask } from "./ask";
import { Collections } from "./collections";
import { DocumentView } from "./document_view";
import { Documents } from "./documents";
import { chosen, collections, failure, refresh } from "./state";

function Rag() {
  useEffect(() => {
    void refresh();
    void loadPlace();
  }, []);
  const isEmpty = collections.value?.length === 0;
  return (
    <>
      <Head title="RAG" lead="Answers from documents, with the sources that they rest on." />
      <div class="playground">
        <div>
          {isEmpty && !failure.value && <Empty icon="documents" title="There is no collection yet. Create one to begin." />}
          {chosen.value && <Ask />}
        </div>
        <div>
          <Collections />
          {chosen.value && <Documents />}
        </div>
      </div>
      <DocumentView />
    </>
  );
}

export const page: Page = {
  name: "rag",
  title: "RAG",
  icon: "documents",
  section: "Playground",
  isForAdmins: false,
  view: Rag,
};
