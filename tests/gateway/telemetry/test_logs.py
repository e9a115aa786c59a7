import logging

from gateway.telemetry.logs import RequestIdFilter, current_request_id


def test_a_record_carries_the_id_of_its_request() -> None:
    record = logging.makeLogRecord({"msg": "x"})
    RequestIdFilter().filter(record)
    assert vars(record)["request_id"] == "-"
    token = current_request_id.set("r-1")
    RequestIdFilter().filter(record)
    current_request_id.reset(token)
    assert vars(record)["request_id"] == "r-1"
