"""Commands refuse wrong arguments before they do anything, with one line that names them and exit code 2."""

import pytest

from sluice.cli.__main__ import main

LISTEN = ["--listen", "tcp://127.0.0.1:0"]
REFUSED: dict[str, list[tuple[list[str], str]]] = {
    "serve": [
        (["--http-port", "x"], "--http-port must be a whole number from 0 to 65535, got 'x'\n"),
        (["--nonsense"], "unrecognized arguments: --nonsense (see sluice serve --help)\n"),
        (["--htp-port", "1"], "unknown option --htp-port; did you mean --http-port? (see sluice serve --help)\n"),
        (["/no/such"], "MODEL must be the folder of a HuggingFace checkpoint or "),
        (["--http-port"], "argument --http-port: expected one argument (see sluice serve --help)"),
    ],
    "dynamo-worker": [
        (["--request-plane", "http"], "--request-plane must be one of tcp, nats, got 'http'"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be"),
    ],
    "engine": [
        ([], "--listen is missing: name an endpoint, such as --listen tcp://127.0.0.1:5557"),
        (["--listen", "tcp://0.0.0.0:5557"], "--listen: tcp://0.0.0.0:5557 is open to other machines"),
        (["--listen", "here"], "an endpoint must be tcp://HOST:PORT, such as tcp://0.0.0.0:5557, got 'here'"),
        ([*LISTEN, "--curve-key", "k"], "--curve-key needs --allowed-clients beside it"),
        ([*LISTEN, "--allowed-clients", "f"], "--allowed-clients needs --curve-key beside it"),
        ([*LISTEN, "--health-port", "x"], "--health-port must be"),
        ([*LISTEN, "--register", "redis:"], "--register must be redis://HOST:PORT/DB#FLEET"),
        (["--listen", "tcp://0.0.0.0:1", "--register", "redis://h"], "--register needs --advertise HOST"),
        ([*LISTEN, "--advertise", "h"], "--advertise needs --register beside it"),
        ([*LISTEN, "--register-weight", "-1"], "--register-weight must be a number"),
    ],
    "fleet": [
        (["up", "--max-num-seqs", "0"], "--max-num-seqs must be"),
        (["up", "--replicas", "-1"], "argument --replicas: must be a whole number of at least 0, got '-1'"),
        (["up", "--gpus-per-replica", "x"], "argument --gpus-per-replica: must be a number of at least 0, got 'x'"),
        (["up", "--scale-from", "gateway"], "argument --scale-from: must be an address http://…, got 'gateway'"),
        (["up", "--name", "a b"], "argument --name: must be letters"),
        (["scale"], "scale needs --replicas"),
        (["away"], "argument up|status|scale|down: invalid choice: 'away'"),
    ],
    "smoke": [
        (["ftp://there"], "--url"),
        (["--grpc", "there"], "--grpc: expected HOST:PORT or none, got 'there'"),
        (["--metrics", "there"], "--metrics: expected a URL"),
    ],
    "usage": [
        (["--by", "week"], "group_by must be of day, key, tenant, model, adapter, got 'week'"),
        (["--start", "yesterday"], "start must be a day such as"),
        (["--start", "2026-03-02", "--end", "2026-03-01"], "start must not be after end"),
        (["--ledger", "/nowhere/ledger.sqlite"], "there is no ledger /nowhere/ledger.sqlite"),
        (["--ledger", "none"], "--ledger is none"),
    ],
    "profile": [(["--seconds", each], "--seconds") for each in ("0", "61", "x")],
    "top": [(["--interval", "0.1"], "at least 0.25")],
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_a_bad_option_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], message: str
) -> None:
    try:
        code = main([command, *arguments])
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.startswith(f"sluice {command}: error: ") and message in shown.err
    assert shown.err.count("\n") == 1
