"""What one model version has done: the counts and times behind statistics, and behind the nv_inference metrics."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.inference.job import Job
    from pipelines.inference.types import InferResponse


class ModelStatistics:
    """Written by jobs and schedulers on the event loop, read by protocols and the metrics page."""

    def record_request(self, job: "Job") -> None:
        """A request has ended, well (`job.outcome` None), in an error or cancelled."""

    def record_refused(self, job: "Job") -> None:
        """A request was refused by the queue."""

    def record_response(self, job: "Job", response: "InferResponse") -> None:
        """One of a decoupled model's responses."""

    def record_execution(self, jobs: "list[Job]") -> None:
        """A batch has run: its times are in its jobs."""
