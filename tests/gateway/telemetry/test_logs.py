import logging
import sys

from sluice.gateway.telemetry.logs import RequestIdFilter, current_request_id
from sluice.log_lines import TextFormatter


def test_a_record_carries_the_id_of_its_request() -> None:
    record = logging.makeLogRecord({"msg": "x"})
    RequestIdFilter().filter(record)
    assert vars(record)["request_id"] == "-"
    token = current_request_id.set("r-1")
    RequestIdFilter().filter(record)
    current_request_id.reset(token)
    assert vars(record)["request_id"] == "r-1"


def test_what_a_client_sent_cannot_imitate_a_line_of_the_log() -> None:
    forged = "2026-11-22 12:00:00,000 ERROR sluice [-] forged"
    formatter = TextFormatter("%(levelname)s %(message)s")
    sent = f"unexpected input 'a\r\n{forged}\x1b[2K\u2028'"
    assert formatter.format(logging.makeLogRecord({"levelname": "INFO", "msg": sent})) == (
        f"INFO unexpected input 'a\\r\\n{forged}\\x1b[2K\\u2028'"
    )
    try:
        raise ValueError(f"x\r{forged}\n{forged}\x9b2K")
    except ValueError:
        record = logging.makeLogRecord({"levelname": "ERROR", "msg": "failed", "exc_info": sys.exc_info()})
    lines = formatter.format(record).splitlines()
    assert lines[0] == "ERROR failed" and lines[-1] == f"  {forged}\\x9b2K"
    assert all(line.startswith("  ") for line in lines[1:])
