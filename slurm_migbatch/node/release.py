"""Taking a run's slices back: the half of a release that follows once the journal says that the run is ending.

It can be interrupted at any instant and done again, by an Epilog, the next hook or the agent. It takes no lock of a
GPU: who takes a slice that became idle does, and looks at the driver then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from slurm_migbatch.node import handoff, progress, usage
from slurm_migbatch.node.caps import Caps, CapsError
from slurm_migbatch.node.journal import Journal, Run, Slice
from slurm_migbatch.node.paths import Paths


class Releaser:
    """Ends runs on one node."""

    def __init__(self, journal: Journal, paths: Paths, caps: Caps) -> None:
        self._journal = journal
        self._paths = paths
        self._caps = caps

    def finish(self, run: Run) -> list[str]:
        """The second half of a release: caps back to root, hand-off void, slices idle, the run ended.

        The run must be `ending` in the journal already, so that nobody begins to share its slices any more. A slice
        that is shared stays open, to the other holder. Returns what went wrong, as sentences; a slice whose devices
        could not be taken back is parked.
        """
        pieces = self._pieces(run)
        closed = self._close(pieces, {})
        if pieces:
            ended = "it was requeued and came back before this node could prepare for it"
            handoff.write(self._paths.job, handoff.Handoff(run.job, run.restart, run.uid, (), ended))
        else:
            handoff.remove(self._paths.job, run.job, run.restart)
        achieved = usage.gather(self._paths, run, pieces)
        while (problems := self._end(run, achieved, closed)) is None:
            closed = self._close(self._pieces(run), closed)  # the other holder of a slice has left meanwhile
        progress.remove(self._paths.progress, run.job, run.restart)
        return problems

    def _pieces(self, run: Run) -> list[Slice]:
        return self._journal.slices("job=? AND restart=?", (run.job, run.restart))

    def _close(self, pieces: Iterable[Slice], closed: Mapping[int | None, str]) -> dict[int | None, str]:
        """Take the devices of slices back that nobody else holds; by row what is closed, and what went wrong."""
        done = dict(closed)
        for piece in pieces:
            if piece.id in done or not self._sole(piece):
                continue
            minors = [minor for minor in (piece.cap_gi, piece.cap_ci) if minor is not None]
            done[piece.id] = ""
            if minors:
                try:
                    self._caps.assign(minors, 0)
                except CapsError as error:
                    done[piece.id] = str(error)
        return done

    def _sole(self, piece: Slice) -> bool:
        return piece.state == "held" and piece.beside is None and self._journal.guest_of(piece) is None

    def _end(self, run: Run, achieved: usage.Figures, closed: Mapping[int | None, str]) -> list[str] | None:
        """The end in the journal; None, with nothing done, where a slice is to be freed that was not closed."""
        with self._journal.write():
            pieces = self._pieces(run)
            if any(piece.id not in closed and self._sole(piece) for piece in pieces):
                return None
            failed = [piece for piece in pieces if closed.get(piece.id) and self._sole(piece)]
            for piece in pieces:
                if piece in failed:
                    zombie = self._journal.put(piece.freed("zombie", closed[piece.id]))
                    self._journal.event("zombie", {**zombie.place, "reason": closed[piece.id]})
                elif piece.state in ("held", "lost"):
                    self._journal.leave(piece)
            self._journal.put_run(run._replace(state="ended", owner="", since=time.time()))
            told = [p for p in sorted(pieces, key=lambda p: p.ordinal or 0) if p.state in ("held", "lost")]
            if told:
                achieved.tell(self._journal, run)
                fields = {"job": run.job, "restart": run.restart, "exit_code": run.exit_code, **_company(told)}
                fields |= {"slices": [piece.told for piece in told], "memory_mib": achieved.memory_mib}
                self._journal.event("stop", fields)
        return [f"{piece}: {closed[piece.id]}" for piece in failed]


def _company(pieces: Iterable[Slice]) -> dict[str, object]:
    """What a `stop` says of a run that had company: its speed and its memory were not its slice's alone."""
    return {"shared": True} if any(piece.shared for piece in pieces) else {}
