"""Builders that several tests of the engine share."""

from sluice.engine.types import GenerateRequest, SamplingParams


def make_request(prompt: list[int], request_id: str = "r", **fields: object) -> GenerateRequest:
    """Make a greedy request; `fields` are those of the request and of its sampling parameters."""
    of_request = {name: fields.pop(name) for name in GenerateRequest.__struct_fields__ if name in fields}
    params = SamplingParams(**{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params, **of_request)  # type: ignore[arg-type]
