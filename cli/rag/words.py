"""What --help of `sluice rag` says."""

OVERVIEW = """\
Put documents into the collections of a running server, and ask questions of them.

commands:
  ingest  bring a collection to what files say: Markdown, HTML, PDF, text, JSON lines
  query   answer a question from a collection's documents, with sources
  search  show the passages that may answer a question
  list    show collections, or the documents of one
  delete  delete documents, or a collection
"""

EPILOG = """\
examples:
  sluice serve                                in one terminal, then in another:
  sluice rag ingest handbook/ --collection docs
  sluice rag query "how do I get a refund?" --collection docs

`sluice rag COMMAND --help` explains a command. Keys are better kept in SLUICE_API_KEY and SLUICE_COLLECTION_KEY
than on the command line.
"""

INGEST = """\
Bring a collection to what files say.

Folders are walked: files that end in .md, .markdown, .html, .htm, .xhtml, .pdf, .txt, .rst, .jsonl or .ndjson are
taken; names that begin with a dot and links to folders are not. A document's id is its path below the given folder,
with slashes; a file given by itself is taken whatever it is called, and its id is its name. A line of a .jsonl file is
a document of its own: {"id", "text", "title", "metadata"}.

What the server has already, by its content's hash, is not sent. So the command can be repeated at any time, and goes on
where it was interrupted.
"""

INGEST_EPILOG = """\
examples:
  sluice rag ingest handbook/                       into the collection docs
  sluice rag ingest handbook/ --collection support
  sluice rag ingest handbook/ --prune               and delete documents whose files are gone
  sluice rag ingest . --include '*.md' --include '*.py' --dry-run

--prune deletes every document of the collection that PATHs have no file for (with --include: of those whose ids match),
so give it all folders that feed the collection. It deletes nothing where something could not be read, or where PATHs
have no document at all.

Exit codes: 0 when all is there; 1 where files failed (they are listed) or the server did not answer; 2 for a bad option
or PATH; 130 after Ctrl-C.
"""

QUERY = """\
Answer a question from a collection's documents. The answer is printed as it comes, then the sources it was given:
[1] TITLE > HEADING (DOCUMENT:START-END), with the range in characters.
"""

QUERY_EPILOG = """\
examples:
  sluice rag query "how do I get a refund?"
  sluice rag query "what changed?" --collection support --filter '{"year": {"gte": 2025}}' --top-k 8
  sluice rag query "how do I get a refund?" --json | jq -r .answer

Exit codes: 0 with an answer, 1 where there is none, 2 for a bad option, 130 after Ctrl-C.
"""

SEARCH = """\
Show the passages of a collection that may answer a question, best first, with their scores. No language model is asked.
"""

SEARCH_EPILOG = """\
examples:
  sluice rag search "refund" --mode bm25
  sluice rag search "money back" --top-k 10 --json | jq '.data[].document'

Exit codes: 0 when the server answered, 1 where it did not, 2 for a bad option.
"""

LIST = """\
Show all collections, or with --collection the documents of one.
"""

LIST_EPILOG = """\
examples:
  sluice rag list
  sluice rag list --collection docs
  sluice rag list --collection docs --json | jq -r .id

Exit codes: 0 when the server answered, 1 where it did not, 2 for a bad option.
"""

DELETE = """\
Delete documents: no answer rests on them from then on. With --all the collection itself; a terminal is asked before.
"""

DELETE_EPILOG = """\
examples:
  sluice rag delete guides/old.md
  sluice rag delete --all --collection support

Exit codes: 0 when they are gone, 1 where one was not there or the server did not answer, 2 for a bad option.
"""
