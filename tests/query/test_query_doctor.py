"""`migbatch doctor` on the query service: off, not answering, another program, and working."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from slurm_migbatch.config import Config, QueryConfig
from slurm_migbatch.doctor.service import check_query
from tests.support.query_site import query_process


def query_finding(**query: object) -> tuple[str, str]:
    config = dataclasses.replace(Config(), query=dataclasses.replace(QueryConfig(), **query))
    (finding,) = check_query(config)
    assert finding.level == "ok" or finding.advice
    return finding.level, finding.text


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of a program that speaks HTTP and is not the query service."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            link, _ = listener.accept()
            with closing(link):
                link.recv(4096)
                link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_doctor_names_what_is_wrong_with_the_query_service(stranger: int) -> None:
    assert query_finding(enabled=False)[0] == "warn"
    level, text = query_finding(port=1)
    assert level == "FAIL" and "no answer from 127.0.0.1 port 1" in text
    level, text = query_finding(port=stranger)
    assert level == "FAIL" and "another program" in text


def test_doctor_reports_a_working_query_service_as_ok(tmp_path: Path) -> None:
    with query_process(tmp_path) as service:
        before = service.log
        assert query_finding(port=service.port) == ("ok", f"127.0.0.1 port {service.port}")
        assert service.log == before, "it does not refuse a query"
