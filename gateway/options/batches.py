"""Options of uploaded files and of batches."""

from dataclasses import dataclass

from sluice.gateway.options.option import integer, option, printable_text, size


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Files and batches: uploads under /v1/files, and the work of /v1/batches"""

    state_path: str | None = option(
        "--state-path",
        None,
        printable_text("the path of a folder"),
        "PATH",
        "folder of the uploaded files and of the batches, which outlive the server. Servers may share it: one of them "
        "at a time works on the batches. Default: sluice/state in $XDG_DATA_HOME or ~/.local/share",
    )
    max_file_bytes: int = option("--max-file-size", 512 << 20, size(1), "SIZE", "largest file that may be uploaded")
    max_stored_bytes: int = option(
        "--max-stored-files-size",
        16 << 30,
        size(1),
        "SIZE",
        "size of all files together from which no more may be uploaded, until some are deleted or expire",
    )
    max_requests: int = option(
        "--max-batch-requests",
        50_000,
        integer(1),
        "COUNT",
        "most requests in a batch. Each costs some 200 bytes of memory while the batch is under way",
    )
