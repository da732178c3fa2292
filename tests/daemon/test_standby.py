"""What a migbatchd that stands by says of itself."""

import asyncio
import json

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.standby import Standby
from slurm_migbatch.daemon.term import AlwaysActive


def test_it_stands_by_until_the_service_has_taken_its_place():
    """Also in the moment when its term has begun: it still refuses nodes and users, and its sockets close."""

    async def health() -> dict[str, object]:
        standby = Standby(Config(), AlwaysActive(), dict)
        found: dict[str, object] = json.loads((await standby._healthz(None)).body)
        return found

    assert asyncio.run(health())["standby"]
