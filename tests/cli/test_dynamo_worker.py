import pytest

from sluice.cli import dynamo_worker
from sluice.gateway.options.config import list_options
from sluice.gateway.options.dynamo import DynamoOptions


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dynamo_worker.command(["--help"])
    shown = capsys.readouterr().out
    for _, _, declared in list_options(DynamoOptions):
        assert declared.flag in shown
    assert "--max-num-seqs" in shown
    assert "--http-port" not in shown


def test_without_dynamo_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamo_worker, "find_spec", lambda name: None)
    assert dynamo_worker.command([]) == 1
    assert capsys.readouterr().err == (
        "sluice dynamo-worker: error: Dynamo's runtime is not installed: pip install 'sluice[dynamo]'\n"
    )


def test_dynamos_python_part_is_a_package_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamo_worker, "find_spec", lambda name: None if name == "dynamo.common" else object())
    assert dynamo_worker.command([]) == 1
    assert "pip install --no-deps ai-dynamo==1.6.1" in capsys.readouterr().err
