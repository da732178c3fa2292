"""Listen on the configured address, else on slurmctld's addresses that this host has, and 127.0.0.1."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping

from slurm_migbatch.daemon.addresses import is_loopback, resolved
from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.server import ApiServer
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.settings import controller_hosts

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
#: seconds between two checks whether this host has another of slurmctld's addresses
_ADDRESSES_S = 30.0


class Listening:
    """The addresses of one server."""

    def __init__(
        self, api: ApiServer, listen: str, settings: Callable[[], Mapping[str, str]], clients: str, section: str
    ) -> None:
        """Set up. `listen`: the configured address, or ""; `settings` are slurmctld's, and may raise SlurmError;
        `clients`: who is served, for the log.
        """
        self._api, self._configured, self._settings = api, listen, settings
        self._clients, self._section = clients, section

    def begin(self) -> None:
        """Listen on the configured address, or on loopback. Raises OSError."""
        self._listen(self._configured or _LOOPBACK)

    async def follow(self) -> None:
        """Listen on slurmctld's addresses, including those that this host gets later, unless one is configured."""
        fault = FaultReporter(
            f"cannot determine the address to listen on for {self._clients}",
            f"set [{self._section}] listen, or start slurmctld",
            log,
        )
        while not self._configured:
            wait = _ADDRESSES_S
            try:
                hosts = controller_hosts(await asyncio.to_thread(self._settings))
                addresses = {address for host in hosts for address in await asyncio.to_thread(resolved, host)}
                for address in sorted(addresses):
                    try:
                        self._listen(address)
                    except OSError as error:
                        if error.errno != errno.EADDRNOTAVAIL:  # another slurmctld's host
                            raise
                if all(is_loopback(address) for address in self._api.addresses if not address.startswith("/")):
                    raise OSError(
                        f"{', '.join(hosts) or 'slurm.conf'} has no address of this host that {self._clients} can reach"
                    )
                fault.succeeded()
            except (SlurmError, OSError) as error:
                wait = fault.failed(error)
            await asyncio.sleep(wait)

    def _listen(self, host: str) -> None:
        if self._api.listen(host):
            log.info("serving %s", self._clients, extra={"address": host, "port": self._api.port})
