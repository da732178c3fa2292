"""Fixtures that several rooms share: private Slurm clusters.

`pytest --slurm-root=DIR` runs them with the Slurm of a debootstrapped Debian (`migbatch testbed root trixie DIR`).
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from slurm_migbatch.testbed import pyslurmroot, restd
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.registry import unmount_below

pytest.register_assert_rewrite("tests.support")

from tests.support.autodetect import has_plugin  # noqa: E402 - after what it is rewritten by
from tests.support.databases import KINDS, Databases, chosen  # noqa: E402 - after what it is rewritten by
from tests.support.directories import open_to_users  # noqa: E402 - after what it is rewritten by
from tests.support.examples import register as register_examples  # noqa: E402 - after what it is rewritten by
from tests.support.order import LONG_S, give_way, interleaved  # noqa: E402 - after what it is rewritten by
from tests.support.recordings import assert_decided_alike  # noqa: E402 - after what it is rewritten by

# CI sees the same examples every time; whoever works on the code sees new ones.
register_examples(repeatable="CI" in os.environ)

_TESTS = Path(__file__).parent
#: for a test on a Slurm cluster with the fixtures that it is the first to use; pyproject.toml has that of all others
CLUSTER_TIME_OUT_S = 900
#: seconds of a test with a cluster of its own and of one of the whole product, in files that order.LONG_S does not have
OWN_CLUSTER_S, WHOLE_PRODUCT_S = 8, 4
#: nice value that this process was started with
_NICE = os.getpriority(os.PRIO_PROCESS, 0)
#: how long the directory of a run stays in which something has failed
KEPT_S = 3 * 86400
_PREFIX = "migbatch-tests-"
#: what the tests of this run write, unless another directory is given
_OWN_DIRECTORY = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slurm-root", default="", metavar="DIR", help="run the Slurm of this debootstrapped Debian")

    how = "kind of database of test clusters and of the tests of the record"
    parser.addoption("--database", default="sqlite", choices=KINDS, help=how)

    how = "kill hooks at every Nth system call (tests/node/test_kills.py)"
    parser.addoption("--kills-every", type=int, default=97, metavar="N", help=how)
    parser.addoption("--kills-first", type=int, default=0, metavar="K", help="begin with the Kth call (0 to N-1)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the run a directory of its own, and a SIGINT that programs under test take.

    pytest has one directory for all runs of a user, and closes it to other users whenever one begins: tests of another
    run that let users into theirs would fail.
    """
    if not config.option.basetemp:  # that of a run's processes is in it
        for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(FileNotFoundError):  # a run beside this one removes it too
                if old.stat().st_mtime < time.time() - KEPT_S:
                    shutil.rmtree(old, ignore_errors=True)
        config.option.basetemp = config.stash[_OWN_DIRECTORY] = tempfile.mkdtemp(prefix=_PREFIX)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells start what they put in the background so, and programs under test would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the run's directory where nothing has failed in it."""
    if exitstatus == pytest.ExitCode.OK and (directory := session.config.stash.get(_OWN_DIRECTORY, "")):
        shutil.rmtree(directory, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses a cluster and spread it over the run; leave out what this Slurm release has no plugin for."""
    for item in items:
        if {"cluster", "new_cluster", "stack", "slurm_root"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slurm)
        if item.get_closest_marker("slurm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(CLUSTER_TIME_OUT_S))
    # Tests on a cluster wait for Slurm most of the time, the others need the processors: both at any time of the run.
    # Files are handed out whole, those that take long first.
    size: Counter[Path] = Counter()
    for item in items:
        whole = WHOLE_PRODUCT_S if item.path.parent.name in ("e2e", "site") else 1
        size[item.path] += OWN_CLUSTER_S if "new_cluster" in getattr(item, "fixturenames", ()) else whole
    for name, seconds in LONG_S.items():
        if _TESTS / name in size:
            size[_TESTS / name] = seconds
    waiting = {item.path for item in items if item.get_closest_marker("slurm")}
    order = interleaved(*({path: size[path] for path in size if (path in waiting) is kind} for kind in (True, False)))
    position = {path: number for number, path in enumerate(order)}
    items.sort(key=lambda item: position[item.path])
    for marker in _not_offered(config):
        without = [item for item in items if item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which tests are left out because of what this Slurm lacks or the database is not."""
    return [f"left out: tests marked {marker}, as {reason}" for marker, reason in _not_offered(config).items()]


def _not_offered(config: pytest.Config) -> dict[str, str]:
    """Return the markers of tests that cannot run here, each with the reason."""
    root = Path(name) if (name := config.getoption("--slurm-root")) else None
    reasons = {
        "nvml_plugin": "" if has_plugin(root) else "has no NVML plugin",
        "pyslurm": "" if pyslurmroot.offered(root) else "has no pyslurm (make pyslurm)",
        "slurmrestd": "" if restd.offered(root) else "has no slurmrestd with tokens and API v0.0.42",
    }
    missing = {
        marker: f"the Slurm of {root or 'this machine'} {reason}" for marker, reason in reasons.items() if reason
    }
    if not os.access("/sys/fs/cgroup/devices", os.W_OK):
        missing["device_cgroup"] = "this machine has no hierarchy of cgroups v1 that constrains devices"
    kind = config.getoption("--database")
    return missing if kind == "sqlite" else {**missing, "sqlite": f"the record is in {kind}"}


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without garbage collections, which would go through thousands of tests and all that they import."""
    gc.disable()
    try:
        _import_first(session)
        return (yield)
    finally:
        gc.enable()


def _import_first(session: pytest.Session) -> None:
    """Let each process of a run of all tests begin with other files: they compile once, not once in each process."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for file in sorted(_TESTS.rglob("test_*.py"))[number::count]:
        name = ".".join(file.relative_to(_TESTS.parent).with_suffix("").parts)
        with suppress(Exception):  # collection reports what is wrong with it
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    """Take what collection made out of garbage collection.

    Thousands of tests and what they import stay to the end of the run; every full collection would go through them.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests without a cluster give way to those on one, which run beside them."""
    give_way(_NICE, to_clusters=item.get_closest_marker("slurm") is None)
    return (yield)


@pytest.fixture
def open_tmp_path(tmp_path: Path) -> Path:
    """`tmp_path`, with every directory above it open to other users."""
    open_to_users(tmp_path)
    return tmp_path


@pytest.fixture(scope="session", autouse=True)
def _no_mounts_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hooks and agents mount a tmpfs in RunDir, which nobody may delete a directory around."""
    yield
    unmount_below(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session", autouse=True)
def databases(request: pytest.FixtureRequest) -> Iterator[Databases | None]:
    """Databases on the server of --database; None where every record is a file of SQLite."""
    with chosen(str(request.config.getoption("--database"))) as found:
        yield found


@pytest.fixture(scope="session")
def slurm_root(request: pytest.FixtureRequest) -> str:
    """Value of --slurm-root: keyword `slurm_root` of Cluster."""
    return str(request.config.getoption("--slurm-root"))


@pytest.fixture(scope="session")
def cluster(slurm_root: str) -> Iterator[Cluster]:
    """One cluster of two nodes with two H100s each for the whole run: submit to it, do not restart its daemons."""
    rest = restd.offered(Path(slurm_root) if slurm_root else None)
    with Cluster(slurm_root=slurm_root, rest=rest) as running:
        yield running


@pytest.fixture(scope="module")
def stack(slurm_root: str) -> Iterator[Cluster]:
    """The same with migbatch installed and running: hooks, agents, migbatchd (`stack.product`), submit filter.

    One for each file: to start takes less processor time than to wait for the end of the run.

    What migbatchd recorded is decided again at the end, and has to come out the same.
    """
    with Cluster(slurm_root=slurm_root, migbatch="all") as running:
        yield running
        assert_decided_alike(running)


@pytest.fixture
def new_cluster(slurm_root: str) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters for one test, which may restart or kill what it likes: `new_cluster(nodes=1, migbatch="hooks")`.

    The keywords are those of `Spec`. What migbatchd recorded on them is decided again before they go.
    """
    with ExitStack() as stack:

        def make(**spec: object) -> Cluster:
            running = stack.enter_context(Cluster(None, slurm_root=slurm_root, **spec))
            stack.callback(assert_decided_alike, running)
            return running

        yield make
