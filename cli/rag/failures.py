"""What can go wrong between `sluice rag` and a server. The texts are for the user."""

_OF_ALL = ("collection", "collection_key")
"""Fields that are the same for all documents of a run."""


class RagError(Exception):
    """Nothing more can be done, or not now."""


class FilesError(Exception):
    """The PATHs cannot be what is meant."""


class Unreachable(RagError):
    """No server, or one that stopped answering."""


class Broken(Unreachable):
    """The connection ended within a request. Servers do that to bodies that they will not read."""


class Refused(RagError):
    """The server said no, to the field `param` ("" where it names none). `retry_after_s` is when it may say yes."""

    def __init__(self, message: str, status: int, retry_after_s: float | None = None, param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.param = param

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed later: too much at once, or a part of the server is down."""
        return self.status in (429, 503)

    @property
    def is_of_the_document(self) -> bool:
        """Whether another document may fare better."""
        return self.status in (400, 413, 422, 500, 504) and self.param not in _OF_ALL
