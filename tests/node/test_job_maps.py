"""The files in which GPU exporters look up the job of each slice, read by the rules of those exporters."""

import os

import pytest

from slurm_migbatch.doctor import node as doctor
from slurm_migbatch.node import exits
from slurm_migbatch.node.conf import ConfError
from slurm_migbatch.node.deadline import Deadline, locked
from slurm_migbatch.node.jobmaps import LOCK, MOST_FILES
from slurm_migbatch.node.journal import JournalError
from tests.support.nodes import ALICE, BOB, GUEST, publish

TWO = "[mig:2g.20gb:1,1g.10gb:1]"


def test_job_maps_name_the_job_and_user_of_each_slice(node):
    node.prolog(7, TWO)
    node.prolog(8, "[mig:1g.10gb:1]", uid=BOB)
    jobs, owners = node.job_maps()
    held = node.slices("held")
    assert sorted(jobs.values()) == [["7"], ["7"], ["8"]]
    assert set(jobs) == {f"0.{row.gi}" for row in held}
    assert owners == {row.mig_uuid: [str(row.job), str(ALICE if row.job == 7 else BOB)] for row in held}
    node.epilog(7)
    assert list(node.job_maps()[0].values()) == [["8"]]
    node.epilog(8)
    assert node.job_maps() == ({}, {})


def test_job_maps_are_readable_by_all_and_writable_by_root_only(node):
    node.prolog(7, TWO)
    for directory in (node.root / "jobmap", node.root / "gpustat"):
        assert os.stat(directory).st_mode & 0o7777 == 0o755
        for path in directory.iterdir():
            assert (path.stat().st_uid, path.stat().st_mode & 0o7777) == (0, 0o644)


def test_job_maps_of_a_slice_shared_by_two_jobs(node):
    """dcgm-exporter gets both jobs; jobstats can take one: the first, then the one that remains."""
    node.prolog(9, "[mig:2g.20gb:1]")
    publish(node)
    node.prolog(1, GUEST)
    ((jobs,), (owner,)) = (list(part.values()) for part in node.job_maps())
    assert jobs == ["9", "1"] and owner == ["9", str(ALICE)]
    node.epilog(9)
    ((jobs,), (owner,)) = (list(part.values()) for part in node.job_maps())
    assert jobs == ["1"] and owner == ["1", str(ALICE)]
    node.epilog(1)
    assert node.job_maps() == ({}, {})


def test_job_map_is_removed_before_its_slice_is_destroyed_or_granted_again(node):
    """Even if the process that ended the job could not remove it: instance ids are reused."""
    node.configure(WarmReuse="any")
    node.forget_executor()
    node.prolog(7, "[mig:2g.20gb:1]")
    stale = {path: path.read_bytes() for name in ("jobmap", "gpustat") for path in (node.root / name).iterdir()}
    node.epilog(7)
    seen = []

    def record_maps(*arguments, inner):
        seen.append(node.job_maps())
        return inner(*arguments)

    for marker, steps in (("[mig:2g.20gb:1]", (node.executor.caps, "grant")), ("[mig:7g.80gb:1]", (None, "destroy"))):
        for path, text in stale.items():
            path.write_bytes(text)
        owner = steps[0] or type(node.executor.gpus.managed()[0])
        inner = getattr(owner, steps[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, steps[1], lambda *args, inner=inner: record_maps(*args, inner=inner))
            assert node.prolog(8, marker, uid=BOB)[0] == exits.OK
        assert seen and all(found == ({}, {}) for found in seen)
        seen.clear()
        node.epilog(8)
    node.check()


def test_reconcile_repairs_missing_changed_and_stale_job_maps(node):
    node.prolog(7, TWO)
    good = node.job_maps()
    for name in good[0]:
        (node.root / "jobmap" / name).unlink()
    for name in good[1]:
        (node.root / "gpustat" / name).write_text("1 0\n")
    (node.root / "jobmap" / "3.14").write_text("666\n")
    (node.root / "jobmap" / ".3.14").write_text("66")
    os.mkfifo(node.root / "gpustat" / "MIG-00000000-0000-0000-0000-000000000000")
    assert node.executor.repairer.repair_all(Deadline(30), dry=True)
    assert not (node.root / "jobmap" / next(iter(good[0]))).exists()
    assert len(node.reconcile()) == 2 + 2 + 1 + 1
    assert node.job_maps() == good and not (node.root / "jobmap" / ".3.14").exists()
    assert node.reconcile() == []


def test_files_of_a_sites_own_prolog_are_kept(node):
    """A site's own Prolog writes the jobs of GPUs that are not divided."""
    node.prolog(7, TWO)
    for directory, name in (("jobmap", "1"), ("gpustat", "1"), ("jobmap", "README")):
        (node.root / directory / name).write_text("5 0\n")
    node.reconcile()
    node.epilog(7)
    assert (node.root / "jobmap" / "1").exists() and (node.root / "gpustat" / "1").exists()
    assert (node.root / "jobmap" / "README").exists()


def writable_by_others(node):
    (node.root / "jobmap").chmod(0o777)


def a_users(node):
    os.chown(node.root / "jobmap", ALICE, ALICE)


def a_link(node):
    (node.root / "jobmap").rmdir()
    (node.root / "elsewhere").mkdir()
    (node.root / "jobmap").symlink_to(node.root / "elsewhere")


def no_directory(node):
    (node.root / "jobmap").rmdir()
    (node.root / "jobmap").write_text("")


def another_file_system(node):
    node.configure(JobMapDir="/dev/shm/migbatch-test-jobmap")
    node.forget_executor()


def above_it(node):
    (node.root / "open").mkdir()
    (node.root / "open").chmod(0o777)
    node.configure(JobMapDir=node.root / "open" / "jobmap")
    node.forget_executor()


def too_full(node):
    for number in range(MOST_FILES + 1):
        (node.root / "jobmap" / f"x{number}").touch()


@pytest.fixture
def _no_shared_memory_left():
    yield
    if os.path.isdir("/dev/shm/migbatch-test-jobmap"):
        os.rmdir("/dev/shm/migbatch-test-jobmap")


@pytest.mark.usefixtures("_no_shared_memory_left")
@pytest.mark.parametrize(
    "broken", [writable_by_others, a_users, a_link, no_directory, another_file_system, above_it, too_full]
)
def test_unusable_job_map_directory_is_reported_and_affects_no_job(node, broken):
    node.prolog(6, "[mig:1g.10gb:1]")
    node.epilog(6)
    assert [found.level for found in doctor.check_job_maps(node.config)] == ["ok"]
    broken(node)
    code, line = node.prolog(7, TWO)
    assert code == exits.OK and "job maps: " in line and "jobmap" in line
    assert len([row for row in node.slices("held") if row.job == 7]) == 2
    assert not (node.root / "elsewhere").exists() or not list((node.root / "elsewhere").iterdir())
    code, line = node.epilog(7)
    assert code == exits.OK and "job maps: " in line
    assert not node.slices("held") and not node.slices("zombie")
    if broken is not too_full:
        (found,) = doctor.check_job_maps(node.config)
        assert found.level == "FAIL" and "jobmap" in found.text and found.advice


def test_held_job_map_lock_does_not_delay_a_job(node):
    with locked(node.executor.paths.lock, [LOCK], Deadline(1)):
        code, line = node.prolog(7, TWO)
        assert code == exits.OK and "waiting for the lock job-maps" in line
    assert node.job_maps() == ({}, {})
    assert len(node.reconcile()) == 4
    node.check()


def test_job_maps_are_off_unless_configured(node):
    node.configure(JobMapDir="", GpustatDir="")
    node.forget_executor()
    code, line = node.prolog(7, TWO)
    assert code == exits.OK and "job maps" not in line
    assert not (node.root / "jobmap").exists() and not (node.root / "gpustat").exists()
    assert list(doctor.check_job_maps(node.config)) == []


def test_relative_job_map_path_is_refused(node):
    with pytest.raises(ConfError, match="JobMapDir=maps: must be an absolute path"):
        node.configure(JobMapDir="maps")


def test_job_maps_of_an_ended_job_are_removed_without_a_writable_journal(node, monkeypatch):
    node.prolog(7, TWO)

    def unwritable(*_arguments, **_values):
        raise JournalError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(node.executor, "_run", unwritable)
        node.epilog(7)
    assert node.job_maps() == ({}, {})
