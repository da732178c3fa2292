"""The stock site with two controllers, a common state directory, and a database on a separate host."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_migbatch.testbed.database import make_data
from tests.support.stock_site import DOCUMENT, StockSite

_URL = "mariadb://migbatch:SECRET@db1/migbatch"
_ACCOUNT = (
    "CREATE DATABASE migbatch; CREATE USER migbatch@'%' IDENTIFIED BY 'SECRET'; GRANT ALL ON migbatch.* TO migbatch@'%'"
)


class PairedSite(StockSite):
    """Two controllers, a node with GPUs, a login node and a database server: `with PairedSite(slurm_root) as site:`."""

    hosts: Sequence[str] = ("db1", "ctl", "ctl2", "h1", "login")
    controllers: Sequence[str] = ("ctl", "ctl2")
    inputs: Mapping[str, str] = {"/root/migbatch-url": f"{_URL}\n"}
    edits: Mapping[str, str] = {
        "SlurmctldHost=ctl(10.7.1.9)": "SlurmctldHost=ctl(10.7.1.9)\nSlurmctldHost=ctl2(10.7.1.8)\nSlurmctldTimeout=5"
    }

    def _prepare(self) -> None:
        assert f"`{_URL}`" in DOCUMENT.read_text(), "the file's content in docs/install.md"
        super()._prepare()
        Path(self._data).mkdir(parents=True)
        make_data(Path(self._data))

    def _start(self) -> None:
        super()._start()
        options = [f"--datadir={self._data}", f"--socket={self._socket}", f"--pid-file={self.directory}/db/pid"]
        self._spawn_on("db1", "mariadbd", ["/usr/sbin/mariadbd", "--no-defaults", "--user=root", *options])
        self.wait("the database server", lambda: self._database("SELECT 1").returncode == 0)
        done = self._database(_ACCOUNT)
        assert done.returncode == 0, done.stderr

    def _database(self, statements: str) -> subprocess.CompletedProcess[str]:
        argv = ["mariadb", "--no-defaults", f"--socket={self._socket}", "-uroot", "-e", statements]
        return subprocess.run(argv, check=False, capture_output=True, text=True)

    @property
    def _data(self) -> str:
        return f"{self.directory}/db/data"

    @property
    def _socket(self) -> str:
        return f"{self.directory}/db/socket"

    def _debian(self, host: str) -> str:
        return "" if host == "db1" else super()._debian(host)
