"""Keep the site's GPUs as the nodes last described them; read them again after events that may have changed them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slurm_migbatch.daemon.log import FaultReporter

if TYPE_CHECKING:  # SQLAlchemy takes longer to import than all that the submit worker needs
    from slurm_migbatch.daemon.writer import StoreWriter

log = logging.getLogger(__name__)
Inventory = Mapping[str, Sequence[Mapping[str, Any]]]
#: node events that may change the inventory
KINDS = frozenset({"boot", "inventory", "state", "fault"})
#: minimum seconds between two readings: each concerns the GPUs of all nodes, however often one node reports
CLOSEST_S = 1.0


class InventoryKeeper:
    """Reads the inventory from the store, in the queue of its writes, and calls the listeners when it has changed."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._asked = asyncio.Event()
        self._asked.set()
        self.latest: Inventory | None = None
        self.listeners: list[Callable[[Inventory], None]] = []
        self._fault = FaultReporter("cannot read the inventory", "see the database error", log)

    def refresh(self) -> None:
        """Request that the inventory is read again, because it may have changed."""
        self._asked.set()

    async def run(self) -> None:
        """Read at start and on request, forever."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                inventory = await asyncio.wrap_future(self._writer.call(lambda s: dict(s.inventory()), "inventory"))
            except Exception as error:
                await asyncio.sleep(self._fault.failed(error))
                self._asked.set()
                continue
            self._fault.succeeded()
            if inventory != self.latest:
                self.latest = inventory
                for listener in self.listeners:
                    listener(inventory)
            await asyncio.sleep(CLOSEST_S)
