"""Loops of migbatchd start again after errors, and end when they are cancelled, whatever they are waiting for then."""

from __future__ import annotations

import asyncio

import pytest

from slurm_migbatch.daemon import tasks
from slurm_migbatch.daemon.tasks import cancel, run_forever, with_timeout


@pytest.mark.parametrize("turns", range(6))
def test_loop_that_is_cancelled_while_its_event_arrives_ends(turns: int) -> None:
    async def main() -> bool:
        event = asyncio.Event()

        async def loop() -> None:
            while True:
                await with_timeout(event.wait(), 100.0)
                event.clear()

        task = asyncio.create_task(loop())
        for _ in range(5):
            await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5.0)
        ended = task.cancelled()
        await cancel(task)
        return ended

    assert asyncio.run(main())


def test_work_is_cancelled_at_its_limit_and_its_result_or_error_returned_before() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def long() -> None:
            try:
                await asyncio.sleep(100.0)
            finally:
                ended.set()

        async def failing() -> None:
            raise ValueError("wrong")

        with pytest.raises(asyncio.TimeoutError):
            await with_timeout(long(), 0.01)
        assert ended.is_set()
        assert await with_timeout(asyncio.sleep(0, "done"), 100.0) == "done"
        with pytest.raises(ValueError, match="wrong"):
            await with_timeout(failing(), 100.0)

    asyncio.run(main())


@pytest.mark.slow
def test_error_of_a_loop_that_had_recovered_is_logged_and_answered_as_the_first_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that answers submissions may be killed once a month, each time with the same message."""
    monkeypatch.setattr(tasks, "_LONGEST_S", 0.3)
    lengths = [0.0, 0.0, 0.4, 0.0]

    async def loop() -> None:
        if lengths:
            await asyncio.sleep(lengths.pop(0))
            raise RuntimeError("the submit service exited with -9")

    asyncio.run(run_forever("submit", loop))
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == 2, "of the first error, and of that after the recovery"
