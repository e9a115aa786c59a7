import pytest

from sluice.cli.rag import arguments
from sluice.gateway.options.config import find_unknown_variables, read_client_options
from sluice.gateway.options.option import OptionError
from sluice.pipelines.rag import library


def test_flags_win_over_variables() -> None:
    environ = {"SLUICE_URL": "http://a:1", "SLUICE_API_KEY": "k1", "SLUICE_COLLECTION_KEY": "k2"}
    options = read_client_options({"--url": "https://b/", "--key": "k3"}, environ)
    assert (options.url, options.api_key, options.collection_key) == ("https://b", "k1", "k3")
    assert "k1" not in repr(options)
    assert "k3" not in repr(options)
    assert find_unknown_variables(environ) == []


@pytest.mark.parametrize(
    "url", ["", "b", "b:8000", "ftp://b", "http://", "http://b:x", "http://b:99999", "http://b?x=1"]
)
def test_what_is_no_server(url: str) -> None:
    with pytest.raises(OptionError, match="--url must be the URL of a server, such as"):
        read_client_options({"--url": url}, {})


def test_the_default_collection_is_the_servers() -> None:
    """The default stands twice in the code, since the client must not import the server."""
    assert arguments.DEFAULT_COLLECTION == library.DEFAULT_COLLECTION
