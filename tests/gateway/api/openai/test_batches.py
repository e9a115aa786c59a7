"""Files and batches by the stock client."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import openai
import pytest
from openai.types import Batch, FileObject

from sluice.engine.config import EngineConfig
from sluice.gateway.answers.batches import worker
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.config import ServeConfig
from tests.gateway.front.http.live import MODEL, LiveServer, live_server
from tests.waiting import PATIENCE_S, wait_for

URL: Final = "/v1/completions"


@pytest.fixture
def stock(live: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(live) as client:
        yield client


def client_of(live: LiveServer, tenant: str = "") -> openai.OpenAI:
    headers = {"x-sluice-tenant": tenant} if tenant else None
    url = f"{live.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S, default_headers=headers)


def line(custom_id: str, url: str = URL, **body: object) -> dict[str, Any]:
    asked: dict[str, dict[str, Any]] = {
        URL: {"prompt": "x", "max_tokens": 3},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        "/v1/responses": {"input": "x", "max_output_tokens": 16},
    }
    body = {"model": MODEL, **asked[url], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(stock: openai.OpenAI, *lines: dict[str, Any]) -> FileObject:
    return stock.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")


def create(stock: openai.OpenAI, *lines: dict[str, Any], window: str = "24h", **settings: Any) -> Batch:
    return stock.batches.create(
        input_file_id=upload(stock, *lines).id,
        endpoint=lines[0]["url"],
        completion_window=window,  # type: ignore[arg-type]
        **settings,
    )


def wait(stock: openai.OpenAI, batch: Batch, is_over: Callable[[Batch], bool] | None = None) -> Batch:
    """Return the batch in its last state, or in the one asked for."""
    is_over = is_over or (lambda found: found.status in ("completed", "failed", "expired", "cancelled"))
    return wait_for(lambda: stock.batches.retrieve(batch.id), is_over)


def results(stock: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a file by custom id; each may be there once."""
    assert file_id is not None
    lines = [json.loads(text) for text in stock.files.content(file_id).text.splitlines()]
    by_id = {each["custom_id"]: each for each in lines}
    assert len(by_id) == len(lines)
    return by_id


def answer_of(body: dict[str, Any]) -> object:
    """Return what an answer says."""
    return body["choices"] if "choices" in body else [item["content"] for item in body["output"]]


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_batch_gets_the_answers_of_live_requests(live: LiveServer, stock: openai.OpenAI, url: str) -> None:
    lines = [line(f"r{i}", url, temperature=0) for i in range(40)]
    lines.insert(7, line("bad", url, temperature=9))
    batch = create(stock, *lines, metadata={"run": "1"}, output_expires_after={"anchor": "created_at", "seconds": 3600})
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"run": "1"}, url)
    done = wait(stock, batch)
    assert (done.status, done.model, done.errors) == ("completed", MODEL, None)
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (41, 40, 1)
    times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at, done.expires_at)
    assert None not in times and list(times) == sorted(each or 0 for each in times)
    found, failed = results(stock, done.output_file_id), results(stock, done.error_file_id)
    assert found.keys() == {f"r{i}" for i in range(40)} and failed.keys() == {"bad"}
    alone = live.post(url, lines[0]["body"]).json()
    response = found["r0"]["response"]
    assert response["status_code"] == 200 and answer_of(response["body"]) == answer_of(alone)
    assert failed["bad"]["response"]["status_code"] == 400 and failed["bad"]["error"] is None
    assert failed["bad"]["response"]["body"]["error"]["param"] == "temperature"
    usages = [each["response"]["body"]["usage"] for each in found.values()]
    for names, counted in ((("prompt_tokens", "input_tokens"), "input_tokens"), (("total_tokens",), "total_tokens")):
        total = sum(next(usage[name] for name in names if name in usage) for usage in usages)
        assert done.usage is not None and getattr(done.usage, counted) == total > 0
    output = stock.files.retrieve(done.output_file_id or "")
    assert output.purpose == "batch_output" and output.expires_at == output.created_at + 3600
    assert stock.batches.list(limit=1).data[0].id == batch.id


def test_a_file_with_bad_lines_fails_and_says_why(stock: openai.OpenAI) -> None:
    failed = wait(stock, create(stock, line("a"), line("a"), line("b", model="gone"), line("c", stream=True)))
    assert failed.status == "failed" and failed.failed_at and failed.errors and failed.errors.data
    problems = [(each.code, each.line, each.param) for each in failed.errors.data]
    assert problems == [
        ("duplicate_custom_id", 2, "custom_id"),
        ("invalid_value", 4, "body.stream"),
        ("model_not_found", 3, "body.model"),
    ]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'failed'"):
        stock.batches.cancel(failed.id)


@pytest.fixture
def begun(live: LiveServer, stock: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batch]:
    """A batch of 30 requests, r0 to r29, of which the first is finished. No other one ends before the test does."""
    monkeypatch.setattr(worker, "REPORT_S", 0.01)
    live.runner.hold_after(3)
    batch = create(stock, *(line(f"r{i}", max_tokens=100 if i else 1, ignore_eos=True) for i in range(30)))
    yield wait(stock, batch, lambda found: found.request_counts is not None and found.request_counts.completed == 1)
    live.runner.release()
    live.wait_idle()


def test_a_cancelled_batch_keeps_what_is_finished(live: LiveServer, stock: openai.OpenAI, begun: Batch) -> None:
    batch = begun
    with pytest.raises(openai.BadRequestError, match=rf"is the input of {batch.id}, which is in_progress; cancel"):
        stock.files.delete(batch.input_file_id)
    assert stock.batches.cancel(batch.id).status == "cancelling"
    over = wait(stock, batch)
    assert (over.status, over.error_file_id) == ("cancelled", None) and over.cancelling_at and over.cancelled_at
    assert live.server.metrics.registry.get_sample_value("sluice_batch_requests_running") == 0
    assert results(stock, over.output_file_id).keys() == {"r0"}
    assert stock.files.delete(batch.input_file_id).deleted


def test_what_is_not_done_in_time_expires(stock: openai.OpenAI, begun: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "monotonic", lambda: time.monotonic() + 86_400)
    over = wait(stock, begun)
    assert over.status == "expired" and over.expired_at and results(stock, over.output_file_id).keys() == {"r0"}
    left = results(stock, over.error_file_id)
    assert left.keys() == {f"r{i}" for i in range(1, 30)}
    assert left["r1"]["response"] is None and left["r1"]["error"]["code"] == "batch_expired"


def test_the_end_is_forecast(stock: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REPORT_S", 0.01)
    batch = create(stock, *(line(f"r{i}", max_tokens=20) for i in range(400)))
    known = wait(stock, batch, lambda found: found.to_dict()["estimated_completion_at"] is not None)
    assert time.time() - 1 < int(str(known.to_dict()["estimated_completion_at"])) < time.time() + 3600
    over = wait(stock, batch)
    assert over.status == "completed" and over.to_dict()["estimated_completion_at"] is None


def test_tenants_do_not_see_each_other(live: LiveServer, stock: openai.OpenAI) -> None:
    with client_of(live, "other") as other:
        mine, theirs = upload(stock, line("a")), upload(other, line("a"))
        batch = other.batches.create(input_file_id=theirs.id, endpoint=URL, completion_window="24h")
        wait(other, batch)
        for refused in (
            lambda: stock.files.retrieve(theirs.id),
            lambda: stock.files.content(theirs.id),
            lambda: stock.files.delete(theirs.id),
            lambda: stock.batches.retrieve(batch.id),
            lambda: stock.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        with pytest.raises(openai.BadRequestError, match="No such File object"):
            stock.batches.create(input_file_id=theirs.id, endpoint=URL, completion_window="24h")
        assert mine.id not in {each.id for each in other.files.list()}
        assert batch.id not in {each.id for each in stock.batches.list()}


def test_lists_have_pages(live: LiveServer) -> None:
    with client_of(live, "pages") as stock:
        ids = [stock.files.create(file=(f"{i}", b"x"), purpose="user_data").id for i in range(5)]
        assert [each.id for each in stock.files.list(limit=2)] == ids[::-1]
        assert [each.id for each in stock.files.list(limit=2, order="asc", after=ids[1])] == ids[2:]
        assert stock.files.list(purpose="batch").data == []
        assert stock.files.list(limit=4).has_more and not stock.files.list(limit=5).has_more
        with pytest.raises(openai.BadRequestError, match="after must be the id of one of the files, got 'nope'"):
            stock.files.list(after="nope")
        with pytest.raises(openai.BadRequestError, match="limit must be"):
            stock.batches.list(limit=101)


FORM = {"file": ("f.jsonl", b"x" * 3000)}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"files": FORM}, "purpose must be one of .*, got nothing"),
        ({"files": FORM, "data": {"purpose": "batch_output"}}, "purpose must be one of .*, got 'batch_output'"),
        ({"files": {"other": ("f", b"x")}}, "the form must have one file, in its field 'file', got another in 'other'"),
        ({"files": {"x": (None, "y")}}, "file is required; with curl"),
        ({"data": {"purpose": "batch"}}, "the body must be multipart/form-data"),
        ({"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "cannot be read"),
        ({"headers": {"content-type": f"multipart/form-data; boundary={'b' * 1000}"}}, "the body must be multipart/"),
        ({"content": b"junk", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "cannot be read"),
        ({"files": FORM, "data": {"purpose": "batch", "expires_after[seconds]": "3600"}}, "must be 'created_at', got"),
        (
            {"files": FORM, "data": {"purpose": "batch", "expires_after[anchor]": "created_at"}},
            r"expires_after\[seconds\] must be a whole number from 3600 to 2592000",
        ),
        ({"files": FORM, "data": {"purpose": "batch", "a": "x" * 100_000}}, "the fields of the form may have"),
    ],
)
def test_bad_uploads_are_refused(live: LiveServer, sent: dict[str, Any], said: str) -> None:
    refused = live.request("POST", "/v1/files", **sent)
    assert refused.status_code == 400
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(refused.json()["error"]["message"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"endpoint": "/v1/models"}, "endpoint must be one of /v1/chat/completions"),
        ({"completion_window": "31d"}, "completion_window must be a number and s, m, h or d, such as 24h, and at most"),
        ({"completion_window": "soon"}, 'at most 30d, got "soon"'),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"input_file_id": "file-none"}, "input_file_id: No such File object"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
    ],
)
def test_bad_batches_are_refused(live: LiveServer, stock: openai.OpenAI, changes: dict[str, Any], said: str) -> None:
    body = {"input_file_id": upload(stock, line("a")).id, "endpoint": URL, "completion_window": "24h", **changes}
    refused = live.post("/v1/batches", body)
    assert refused.status_code == 400 and said in refused.json()["error"]["message"]


def test_another_file_is_no_input(live: LiveServer, stock: openai.OpenAI) -> None:
    other = stock.files.create(file=("a", b"x"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match=r"whose purpose is 'batch', got .* 'user_data'"):
        stock.batches.create(input_file_id=other.id, endpoint=URL, completion_window="24h")


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server that runs four sequences at a time, and takes little."""
    options = BatchOptions(max_file_bytes=200_000, max_stored_bytes=300_000)
    engine = EngineConfig(model_path="none", max_num_seqs=4)
    with live_server(ServeConfig(batches=options), engine, num_blocks=2048) as running:
        yield running


def test_a_batch_gives_way_to_other_requests(small: LiveServer) -> None:
    with client_of(small) as stock:
        batch = create(stock, *(line(f"r{i}", max_tokens=100, ignore_eos=True) for i in range(8)))
        wait(stock, batch, lambda found: small.engine.stats.num_running == 3)  # one place stays free
        with httpx.Client(base_url=small.url, timeout=PATIENCE_S) as client:
            asked = {"model": MODEL, "prompt": ["a", "b", "c", "d"], "max_tokens": 50}
            assert client.post(URL, json=asked).status_code == 200
        [yields] = (small.server.metrics.registry.get_sample_value("sluice_batch_yields_total"),)
        assert yields is not None and yields >= 1
        assert stock.batches.retrieve(batch.id).status == "in_progress"
        over = wait(stock, batch)
        assert results(stock, over.output_file_id).keys() == {f"r{i}" for i in range(8)}


@pytest.mark.parametrize(
    ("sent", "name", "disposition"),
    [
        ("in.jsonl", "in.jsonl", 'filename="in.jsonl"'),
        ("../../etc/passwd", "passwd", 'filename="passwd"'),
        ("C:\\folder\\a b.txt", "a b.txt", 'filename="a b.txt"'),
        ("..", "file", 'filename="file"'),
        ("naïve 文.txt", "naïve 文.txt", "filename=\"na_ve _.txt\"; filename*=UTF-8''na%C3%AFve%20%E6%96%87.txt"),
        ('a";x=%41.txt', 'a";x=%41.txt', "filename=\"a_;x=_41.txt\"; filename*=UTF-8''a%22%3Bx%3D%2541.txt"),
    ],
)
def test_a_file_comes_back_by_its_name_alone(live: LiveServer, sent: str, name: str, disposition: str) -> None:
    escaped = sent.replace('"', '\\"')
    part = f'content-disposition: form-data; name="file"; filename="{escaped}"'
    purpose = 'content-disposition: form-data; name="purpose"\r\n\r\nuser_data'
    body = f"--b\r\n{part}\r\n\r\nx\r\n--b\r\n{purpose}\r\n--b--\r\n".encode()
    headers = {"content-type": "multipart/form-data; boundary=b"}
    kept = live.request("POST", "/v1/files", content=body, headers=headers).json()
    content = live.request("GET", f"/v1/files/{kept['id']}/content")
    assert (kept["filename"], content.headers["content-disposition"]) == (name, f"attachment; {disposition}")


def test_files_are_bounded(small: LiveServer) -> None:
    with client_of(small, "bounded") as stock:
        before = set((small.batches.store.folder / "files").glob("*"))
        with pytest.raises(openai.APIStatusError, match=r"at most 200000 bytes \(--max-file-size\)") as refused:
            stock.files.create(file=("a", b"x" * 200_001), purpose="user_data")
        assert refused.value.status_code == 413
        stock.files.create(file=("a", b"x" * 200_000), purpose="user_data")
        with pytest.raises(openai.APIStatusError, match="--max-stored-files-size"):
            stock.files.create(file=("a", b"x" * 150_000), purpose="user_data")
        [kept] = set((small.batches.store.folder / "files").glob("*")) - before
        assert kept.stat().st_size == 200_000
