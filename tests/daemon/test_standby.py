"""What a standby migbatchd reports about itself."""

import asyncio
import json

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.standby import Standby
from slurm_migbatch.daemon.term import AlwaysActive


def test_health_reports_standby_until_the_service_has_taken_over():
    """Also at the moment when its term has begun: it still refuses nodes and users, and its sockets close."""

    async def health() -> dict[str, object]:
        standby = Standby(Config(), AlwaysActive(), dict)
        found: dict[str, object] = json.loads((await standby._healthz(None)).body)
        return found

    assert asyncio.run(health())["standby"]
