from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from server.listening import check_tls
from server.options import ServerOptions


def test_tls_files_that_no_connection_could_use_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    for file, text in (
        ("nowhere.pem", "ssl_certfile .* cannot be read: No such file"),
        ("text.pem", "are no certificate with its key"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_tls(ServerOptions.from_options(ssl_certfile=str(tmp_path / file)).network)


def test_options_of_tls_are_refused_without_a_certificate() -> None:
    for option in ({"ssl_keyfile": "key.pem"}, {"ssl_ca_certs": "ca.pem"}, {"ssl_cert_reqs": 2}, {"ssl_ciphers": "HIGH"}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))} needs ssl_certfile"):
            ServerOptions.from_options(**option)
