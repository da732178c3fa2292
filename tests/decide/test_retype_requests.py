"""Where Slurm adds a new GRES to the old one, a change of type is two requests; the job is safe after each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_migbatch.daemon.actuator import apply_orders
from slurm_migbatch.decide.lending.loan import JobView
from slurm_migbatch.decide.lending.model import LoanOrder, OrderKind
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, SlurmRefused
from slurm_migbatch.workload.loans import loan_hints

COMMENT = "migbatch: role=train [mig:loan:1#loan]"


class Adding:
    """Keeps pending jobs' GRES as Slurm 22.05 does: entries are added, and emptied only all at once."""

    def __init__(self, *started: str) -> None:
        self.started = started
        self.needs: dict[str, dict[str, dict[str, int]]] = {}
        #: nodes that users exclude, by job
        self.own: dict[str, str] = {}

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        for name, fields in updates.items():
            if name in self.started:
                continue
            needs = self.needs.setdefault(name, {"node": {"loan": 2}, "job": {}})
            for key, of in (("TresPerNode", "node"), ("TresPerJob", "job"), ("Gres", "node")):
                text = fields.get(key)
                if text == "":
                    needs[of] = dict.fromkeys(needs[of], 0)
                for entry in (text or "").split(","):
                    kind, _, count = entry.removeprefix("gres:").removeprefix("mig:").partition(":")
                    if count.strip("0"):
                        needs[of][kind] = int(count)
            assert [n for of in needs.values() for n in of.values() if n], "it would start without a slice"
        if refused := {name: "Job is no longer pending execution" for name in updates if name in self.started}:
            raise SlurmRefused(refused, len(updates))

    def excluded_nodes(self, job_ids: Iterable[int | str]) -> Mapping[str, str]:
        return {str(job): self.own[str(job)] for job in job_ids if str(job) in self.own}

    def signal_all(self, job_ids: Iterable[int | str], name: str, *, script: bool = True) -> None:
        raise AssertionError

    def requeue_all(self, job_ids: Iterable[int | str]) -> None:
        raise AssertionError


def row(job: int) -> JobRow:
    return JobRow(job, partition="train", gres="gres:mig:loan:2", comment=COMMENT, reason="ReqNodeNotAvail")


def job_view(job: int) -> JobView:
    hints = loan_hints(COMMENT, "train", "gres:mig:loan:2", {"train"})
    assert hints is not None
    return JobView(row(job), hints)


def test_release_leaves_only_the_released_profile_in_the_gres() -> None:
    slurm = Adding("8")
    orders = [LoanOrder(OrderKind.RELEASE, job, 0, "idle", profile=Profile(2, 20)) for job in (7, 8)]
    done = apply_orders(orders, {7: job_view(7), 8: job_view(8)}, slurm, lambda: 0.0)
    assert {kind: n for of in slurm.needs["7"].values() for kind, n in of.items() if n} == {"2g.20gb": 1}
    assert [(applied.order.job, bool(applied.error)) for applied in done] == [(7, False), (8, True)]


def test_release_that_would_replace_a_users_excluded_nodes_is_refused() -> None:
    slurm = Adding()
    slurm.own["8"] = "n7"
    orders = [LoanOrder(OrderKind.RELEASE, job, 1, "idle", profile=Profile(2, 20), away=("n1",)) for job in (7, 8)]
    done = apply_orders(orders, {7: job_view(7), 8: job_view(8)}, slurm, lambda: 0.0)
    assert "8" not in slurm.needs and [bool(request.error) for request in done] == [False, True]
    assert done[1].error == "its user excludes n7, which is kept"
