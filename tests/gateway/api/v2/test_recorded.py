"""Both protocols answer what was asked of the real Triton as it did, over the recorded models' own code.

What rests on the repository, on workers and on schedulers is asked of a whole server: tests/triton/test_exam.py.
"""

import re
from collections.abc import Iterator

import pytest

from tests.gateway.api.v2.ports import both_ports
from tests.gateway.api.v2.recorded_models import recorded_models
from tests.gateway.api.v2.small_service import SmallService
from tests.triton.compare import Verdict
from tests.triton.on_purpose import NEWER, ON_PURPOSE
from tests.triton.records import Exchange, read_exchanges
from tests.triton.replay import EXCHANGES, Replayed, replay

_OF_WHOLE_SERVERS = re.compile(
    r"\w+/(config|config_version|fault|sequence|sequence_text|statistics|load|unload|index)/"
    r"|\w+/(metadata|ready|generate|generate_stream)/(sequence\w*|autoconf|misbehave|reshaped)$"
    r"|http/(shape/(autoconf|reshaped)\w*|raw/bytes_batch)$|grpc/raw/reshaped$|http/route(/|/v1|//v2|/V2|/metrics)$"
)
_OTHER_WORDS = re.compile(
    r".*/(RAISE|NO_SUCH_CODE|error_raise|model_error_RAISE|once_missing)$"  # what Python says of a fault in a model
    r"|.*/(shape/too_few|tensor/data_empty|extra_input|header_length/empty|deflate_raw|gzip_plain|in_size_\w+)$"
    r"|\w+/cuda/register$|grpc/unknown_method$"
)
"""Names of refusals that say it otherwise than the real server, and not worse."""
Answers = dict[str, Replayed]


def is_asked(exchange: Exchange) -> bool:
    is_pause = exchange.protocol == "local" and exchange.request["action"] == "sleep"
    return not is_pause and not _OF_WHOLE_SERVERS.match(exchange.name)


ASKED = [each for each in read_exchanges(EXCHANGES) if is_asked(each)]
TOPICS = sorted({"/".join(each.name.split("/")[:2]) for each in ASKED if each.protocol != "local"})


@pytest.fixture(
    scope="module", params=[(True, "sluice"), (False, "grpcio")], ids=["direct", "by the application and grpcio"]
)
def answers(request: pytest.FixtureRequest) -> Iterator[Answers]:
    is_direct, grpc_server = request.param
    service = SmallService(*recorded_models())
    settings = {"is_direct": is_direct, "grpc_server": grpc_server, "forwarded": "x-fwd-.*"}
    with both_ports(service, **settings) as (url, address):
        yield {each.name: each for each in replay(ASKED, url, address)}


@pytest.mark.parametrize("topic", TOPICS)
def test_answers_are_those_of_the_real_server(answers: Answers, topic: str) -> None:
    """Statuses, shapes, values and words; an error's content type is ours."""
    found = {name: each for name, each in answers.items() if f"{name}/".startswith(f"{topic}/")}
    different = {name: each.reasons for name, each in found.items() if each.verdict is Verdict.DIFFERS}
    named = {name for name in found if name in ON_PURPOSE or name in NEWER}
    assert {name: reasons for name, reasons in different.items() if name not in named} == {}
    assert named - different.keys() == set(), "these no longer differ"
    worded = {
        name: reasons
        for name, each in found.items()
        if (reasons := [every for every in each.reasons if not every.startswith("content-type")])
    }
    assert {
        name: reasons for name, reasons in worded.items() if name not in named and not _OTHER_WORDS.match(name)
    } == {}
