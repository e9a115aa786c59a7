"""Files that operators write in YAML or JSON: each is read, or refused by its name and the reason."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.fleet.membership.file import read_members
from sluice.engine.fleet.membership.members import check_members
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.ledger.prices import read_prices
from sluice.pipelines.llm.model_folder import read_model_yaml
from sluice.pipelines.routes.settings import read_routes
from tests.fuzz.damage import damaged
from tests.fuzz.running import fuzzed

ENGINES = b"""client_key: me.key_secret
engines:
  - {name: a, address: 'tcp://10.0.0.1:5557', server_key: a.key, weight: 2}
  - {name: b, address: 'tcp://[::1]:5557', server_key: b.key, version: new}
"""
ENDPOINTS = b"""endpoints:
  - {name: pod-0, address: 10.0.0.1, port: '5557', labels: {role: decode}}
  - {name: pod-1, address: 'fd00::2', port: 5558}
"""
ROUTES = b"""routes:
  assistant:
    description: the website's assistant
    targets: [{model: hosted-gpt, timeout_s: 20}, {model: rill}, {model: "rill:polite"}]
    retries: 3
    hedge_after_ms: 300
    cache: true
  experiment: {choose: weighted, targets: [{model: rill, weight: 95}, {model: other, weight: 5}]}
"""
PRICES = b"""rill: {prompt: 0.1, cached: 0.01, generated: 0.5}
"*": {prompt: 1, generated: 2.5e-1}
"""
MODEL = b"""backend: pytorch
kv_cache_config: {free_gpu_memory_fraction: 0.8, tokens: [1, 2]}
max_batch_size: 8
triton_config: {decoupled: true, max_batch_size: 4}
"""
SNIPPETS = (
    *(b"2024-99-99", b"2024-01-01", b"12:99:99", b"0x", b"0b2", b"1_0", b".inf", b".nan", b"~", b"yes", b"!!int x"),
    *(b"!!binary x", b"!!timestamp x", b"!!float x", b"!!set {a, a}", b"!!omap [a]", b"!!pairs [a]"),
    *(b"!x", b"!!null x"),
    *(b"&a [*a]", b"&a", b"*a", b"<<: *a", b"<<: 1", b"? [a]\n", b"{", b"}", b"[", b"]", b"- ", b": ", b"#"),
    *(b"|", b">"),
    *(b"[" * 2000, b"{a: " * 600, b"- " * 2000, b"\t", b"'", b'"', b'"\\ud800"', b"---", b"...", b"%YAML 9", b"null"),
    *(b"engines:", b"endpoints:", b"weight: ", b"model: ", b"targets: ", b"1e999", b"1" * 5000, b"5.5", b"[1]", b"{}"),
    *(b"tcp://h:1", b"tcp://h:99999", b"\xef\xbb\xbf", b"\x85", b"-1", b'""', b"true"),
)
Read = Callable[[Path], object]
FILES: tuple[tuple[bytes, str, Read], ...] = (
    (ENGINES, "engines.yaml", lambda path: check_members(read_members(path))),
    (ENDPOINTS, "engines.yaml", lambda path: check_members(read_members(path))),
    (ROUTES, "routes.yaml", lambda path: read_routes(str(path))),
    (PRICES, "prices.yaml", lambda path: read_prices(str(path))),
    (MODEL, "model.yaml", lambda path: read_model_yaml(path.parent)),
)


@fuzzed(60)
@given(st.sampled_from(FILES), st.data())
def test_a_file_is_read_or_refused(file: tuple[bytes, str, Read], data: st.DataObject) -> None:
    content, name, read = file
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data.draw(damaged(content, SNIPPETS)))
        try:
            read(path)
        except SluiceError as error:
            assert error.code is ErrorCode.INVALID
            assert str(path) in error.message
            error.message.encode()
        except ValueError as error:
            assert str(path) in str(error)
            str(error).encode()
