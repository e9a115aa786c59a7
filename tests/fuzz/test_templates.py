"""Chat templates of clients, hostile ones among them: each writes its text or is refused, within time and memory."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.chat_template import TemplateSandbox
from sluice.pipelines.text.template_worker import MAX_CHARS, TemplateJob
from tests.fuzz.running import fuzzed
from tests.paths import RILL_TOKENIZER

pytestmark = pytest.mark.slow

GOOD = (
    (RILL_TOKENIZER / "chat_template.jinja").read_text(),
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ tools }}{{ documents }}{{ strftime_now('%Y') }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
)
HOSTILE = (
    "{% for a in range(10 ** 9) %}{% for b in range(10 ** 9) %}{% endfor %}{% endfor %}",
    "{% set x = 'a' * 10 ** 9 %}{{ x }}",
    "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x * 2 %}{% endfor %}{{ ns.x | length }}",
    "{{ 2 ** 10 ** 8 }}",
    "{{ ('%099999999d' % 1) | length }}",
    "{{ 'x'.format('{:>999999999}') }}{{ '{:>999999999}'.format(1) | length }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% import 'os' as os %}{% include '/etc/passwd' %}",
    r"{{ '\ud800' }}",
    r"{{ '\udfff' | tojson }}{{ '\0' }}",
    r"{{ raise_exception('\ud800') }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ undefined_name.attribute }}",
    "{{ [1, 2] | map('no') | list }}",
    "{{ messages | groupby('role') | list }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ 'a' | wordwrap(1) }}{{ 'a' | indent(10 ** 9) }}",
    "{{ " + "(" * 90 + "1" + ")" * 90 + " }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 40 + "{% endif %}" * 40,
    "{{ " + "-" * 5000 + "1 }}",
    "{{ lipsum(n=10 ** 3) }}",
    "{{ dict(a=1) | xmlattr }}{{ joiner() }}",
    "{% set a %}{% endset %}{{ a.x }}",
    "{%- raw %}{{{% endraw %}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ range(10 ** 18) | list | length }}",
    "{{ 'a' | replace('', 'b' * 10 ** 6) | replace('', 'c' * 10 ** 6) }}",
    r"{{ strftime_now('%' * 10 ** 6) }}{{ strftime_now('\ud800') }}",
)
PIECES = (
    *GOOD,
    *HOSTILE,
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{% endfor %}",
    "{% else %}",
    "{% break %}",
    "\ud7ff",
    "\0",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ("a", "messages", "tools", "self", "x y", "", "chat_template", "return_dict", "é", "range", "None")
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    yield TemplateSandbox()


@st.composite
def jobs(draw: st.DrawFn) -> TemplateJob:
    template = "".join(draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3)))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(template)))
        template = template[:at] + draw(st.text(max_size=4)) + template[at + draw(st.integers(0, 4)) :]
    turns: list[dict[str, Any]] = [{"role": "user", "content": draw(st.text(max_size=20))}]
    turns += draw(st.lists(st.fixed_dictionaries({"role": st.text(max_size=5), "content": VALUES}), max_size=2))
    tools = draw(st.none() | st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=2), max_size=2))
    arguments = draw(st.dictionaries(NAMES, VALUES, max_size=2))
    return TemplateJob(template, turns, tools, None, draw(st.booleans()), draw(st.booleans()), arguments)


@fuzzed(6)
@given(jobs())
def test_a_template_writes_or_is_refused(
    sandbox: TemplateSandbox, capfd: pytest.CaptureFixture[str], job: TemplateJob
) -> None:
    check(sandbox, capfd, job)


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile_templates(sandbox: TemplateSandbox, capfd: pytest.CaptureFixture[str], template: str) -> None:
    check(sandbox, capfd, TemplateJob(template, [{"role": "user", "content": "hi"}], None, None, True, False, {}))


def check(sandbox: TemplateSandbox, capfd: pytest.CaptureFixture[str], job: TemplateJob) -> None:
    try:
        text = sandbox.render(job)
    except SluiceError as error:
        assert (error.code, error.param) == (ErrorCode.INVALID, "chat_template")
        error.message.encode()
    else:
        text.encode()
        assert len(text) <= MAX_CHARS
    assert "Traceback" not in capfd.readouterr().err
