"""RunDir is emptied while jobs run: their hand-offs are written again from the journal."""

from __future__ import annotations

from pathlib import Path

from tests.support.nodes import BOB, Node


def lose_handoffs(node: Node) -> None:
    for path in Path(f"{node.config.run_dir}/job").iterdir():
        path.unlink()


def test_lost_hand_offs_of_running_jobs_are_written_again(node: Node) -> None:
    node.prolog(1, "[mig:1g.10gb:2]")
    node.prolog(2, "[mig:2g.20gb:1]", uid=BOB)
    node.prolog(3, "[mig:1g.10gb:1]")
    node.epilog(3)
    before = [node.handoff(job) for job in (1, 2)]
    assert None not in before
    lose_handoffs(node)
    assert "job 1 run 0: its hand-off was missing and is written again" in node.reconcile()
    assert [node.handoff(job) for job in (1, 2)] == before
    assert node.handoff(3) is None, "its job is over"
    assert node.reconcile() == []


def test_hand_off_whose_writing_was_interrupted_is_written_again(node: Node) -> None:
    node.prolog(1, "[mig:1g.10gb:1]")
    before = node.handoff(1)
    lose_handoffs(node)
    Path(f"{node.config.run_dir}/job/.1.0").write_text("version 1\njob 1\n")
    node.reconcile()
    assert node.handoff(1) == before
    assert node.reconcile() == []


def test_hand_off_of_a_job_with_cuda_index_is_written_again_as_it_was(node: Node) -> None:
    """Only its text has what `handoff.load` leaves out: the devices by which TaskProlog numbers the slices."""
    node.prolog(1, "", SLURM_JOB_COMMENT="migbatch: cuda=index [mig:1g.10gb:1]")
    path = Path(f"{node.config.run_dir}/job/1.0")
    before = path.read_text()
    assert "cuda index" in before
    lose_handoffs(node)
    node.reconcile()
    assert path.read_text() == before
    assert "already has its slices" in node.prolog(1, "", SLURM_JOB_COMMENT="migbatch: cuda=index [mig:1g.10gb:1]")[1]
