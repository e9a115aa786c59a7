"""Fields that people believe config.pbtxt to have, and what has their meaning instead."""

import re
from collections.abc import Iterator

from serving.config.locations import Locations
from serving.config.reader import WrittenField
from serving.config.slip import Slip, finding_at
from serving.findings import ConfigFinding

_RATE_LIMIT = "rate_limit_resources"
_AGENTS = "model_repository_agents"
_POLICY_TEXTS = {
    "latest": "version_policy { latest { num_versions: 1 } }",
    "all": "version_policy { all { } }",
    "specific": "version_policy { specific { versions: [1] } }",
}


def foreign_slip(written: WrittenField, locations: Locations, text: str) -> Slip | None:
    """What there is to say of such a field; None for any other."""
    if written.names == (_AGENTS, "kind"):
        return _agents_slip(written, locations, text)
    if written.names in ((_RATE_LIMIT,), ("instance_group", _RATE_LIMIT)):
        return Slip(_rate_limit_finding(written, locations), *written.statement)
    return None


def _rate_limit_finding(written: WrittenField, locations: Locations) -> ConfigFinding:
    """Rate limiting has its fields in the instance group, and its budget on the command line."""
    if len(written.path) > 1:
        remedy = _limiter_text([each.value for each in _siblings(written, locations) if each.value], locations)
        return finding_at(written, "ModelInstanceGroup has no field 'rate_limit_resources'", remedy)
    names = [each.value for each in _below(written, "name", locations) if each.value] or ["NAME"]
    budget = " ".join(f"--rate-limit-resource={name}:COUNT" for name in names)
    return finding_at(
        written,
        "ModelConfig has no field 'rate_limit_resources': how much there is of a resource is said to the server, what "
        "an instance takes of it in its instance_group",
        f"instance_group [ {{ {_limiter_text(names, locations)} }} ], and start with {budget}",
    )


def _limiter_text(names: list[str], locations: Locations) -> str:
    each = (f'{{ name: "{name}"{" global: true" if _is_global(name, locations) else ""} count: 1 }}' for name in names)
    return f"rate_limiter {{ resources [ {', '.join(each)} ] }}"


def _is_global(resource: str, locations: Locations) -> bool:
    """Whether the field at the top says so."""
    top = [each for each in locations.fields if each.names == (_RATE_LIMIT, "name") and each.value == resource]
    flags = [locations.find(f"{_RATE_LIMIT}[{each.path[0][1]}].global") for each in top]
    return any(flag is not None and flag.value == "true" for flag in flags)


def _agents_slip(written: WrittenField, locations: Locations, text: str) -> Slip:
    """Agents have a name; one of kind version_policy is no agent but the field of that name."""
    if written.value != "version_policy":
        message = "model_repository_agents has no field 'kind'"
        return Slip(finding_at(written, message, _agent_text(written.value or "")), *written.statement)
    path = f"{_AGENTS}[{written.path[0][1]}]"
    block, asked = locations.find(path), locations.find(f"{path}.parameters[0].value")
    policy = asked.value if asked is not None and asked.value in _POLICY_TEXTS else "latest"
    place = locations.find(f"version_policy.{policy}")
    is_said_again = place is not None and place.names == ("version_policy", policy)
    if block is None or place is None or not is_said_again or len(list(_siblings(block, locations))) > 1:
        message = "an agent of kind version_policy does not exist: which versions are served is a field of its own"
        return Slip(finding_at(written, message, _POLICY_TEXTS[policy or ""]), *written.statement)
    finding = finding_at(
        block,
        "there is no agent of kind version_policy, it is left out: version_policy in line "
        f"{locations.line_of('version_policy')} says which versions are served",
        f"version_policy alone; an agent is {_agent_text('checksum')}",
    )
    begin, end = block.statement
    return Slip(finding, begin, end, re.sub(r"[^\n]", " ", text[begin:end]))


def _agent_text(kind: str) -> str:
    return f'model_repository_agents {{ agents [ {{ name: "{kind}" }} ] }}'


def _siblings(written: WrittenField, locations: Locations) -> Iterator[WrittenField]:
    """The values of the same statement, itself too."""
    return (each for each in locations.fields if each.statement == written.statement)


def _below(written: WrittenField, name: str, locations: Locations) -> Iterator[WrittenField]:
    """The fields called `name` in every value of the same statement."""
    parents = {each.path for each in _siblings(written, locations)}
    return (each for each in locations.fields if each.path[:-1] in parents and each.path[-1][0] == name)
