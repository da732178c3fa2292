"""`migbatch usage` as a manager sees it: who held what, how much of it idle, of which total; against plain SQL."""

from __future__ import annotations

import csv
import io
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.cli.common import run as run_command
from slurm_migbatch.cli.main import cli
from slurm_migbatch.report.lines import csv_line
from slurm_migbatch.report.pictures.bins import TimeBins
from slurm_migbatch.report.pictures.sums import SliceColumns, use_by_account
from slurm_migbatch.store import windows
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.queries import RunFilter
from slurm_migbatch.store.reader import open_reader
from tests.support.store_events import Node, slice_entry
from tests.support.transcripts import transcript
from tests.support.usage_record import H, at, describe, run

OCTOBER = ("-S", "2026-10-01", "-E", "2026-11-01")
SHARES = {"1g.10gb": 1 / 7, "2g.20gb": 2 / 7, "3g.40gb": 1 / 2, "7g.80gb": 1.0}
SIZES = {"1g.10gb": 1, "2g.20gb": 2, "3g.40gb": 4, "7g.80gb": 8}

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('usage')}/x.db"
    with open_store(url) as store:
        n1, n2 = Node(store), Node(store, "n2", "bb")
        n1.send(describe(n1, at("09-01")))
        n2.send(describe(n2, at("10-16"), 4))
        three = slice_entry(0, 4, "3g.40gb", "GPU-n1-0")
        busy = {"seconds": 10 * H, "sm": 0.25, "tensor": 0.1, "dram": 0.2}
        # 10 hours on half a GPU, three quarters of it idle
        run(store, n1, 1, at("10-02T10:00"), at("10-02T20:00"), three, activity=busy)
        # from September into October, 2 of 4 hours
        run(store, n1, 2, at("09-30T22:00"), at("10-01T02:00"), slice_entry(0, 8, "7g.80gb", "GPU-n1-1"))
        # two slices on two nodes
        two = (slice_entry(0, 2, "2g.20gb", "GPU-n1-0"), slice_entry(2, 2, "2g.20gb", "GPU-n1-0"))
        run(store, n1, 3, at("10-20T00:00"), at("10-20T07:00"), *two, user="bob", uid=1002)
        n2.send(
            n2.start(at("10-20T00:00"), 3, slice_entry(gpu="GPU-n2-0")),
            n2.stop(at("10-20T07:00"), 3, slice_entry(gpu="GPU-n2-0")),
        )
        # another account, and a run that has not ended
        run(store, n2, 4, at("10-21T00:00"), at("10-21T01:00"), account="biology", user="carol", uid=1003)
        run(store, n2, 5, at("10-31T23:00"), None, account="biology", user="carol", uid=1003)
        n1.send(n1.event("hello", at("11-14")))
        n2.send(n2.event("hello", at("11-14")))
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as record, record:
        record.execute("update nodes set seen=?", (at("11-15"),))
    return url


@pytest.fixture
def usage(database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("MIGBATCH_DB", database)
    monkeypatch.delenv("SLURM_TIME_FORMAT", raising=False)
    monkeypatch.setattr(time, "time", lambda: at("11-15"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run_command(cli, "migbatch", ("usage", *arguments))
        return (code, *capsys.readouterr())

    return call


TABLE = """\
Slices held from 2026-10-01T00:00:00 to 2026-11-01T00:00:00; percent of the GPUs' time
ACCOUNT    USER   JOBS  SLICE-HOURS  GPU-HOURS  %CAPACITY        %IDLE  %SAMPLED
chemistry  alice     2        12.00       7.00        0.2         75.0        71
chemistry  bob       1        21.00       5.00        0.2  not sampled         0
biology    carol     2         2.00       0.29        0.0  not sampled         0
total                5        35.00      12.29        0.4         75.0        41
"""


def test_default_table_shows_the_usage_of_a_month(usage: Cli) -> None:
    code, out, err = usage(*OCTOBER)
    assert (code, err) == (0, "")
    assert out == TABLE


def test_output_is_what_the_documentation_for_users_shows(usage: Cli) -> None:
    assert usage("-A", "chemistry", *OCTOBER)[1] == transcript(
        "docs/users.md", f"migbatch usage -A chemistry {' '.join(OCTOBER)}"
    )


def test_usage_of_one_account_is_one_line_with_its_idle_share(usage: Cli) -> None:
    out = usage(*OCTOBER, "-A", "chemistry", "--by", "account", "-n")[1]
    assert out.split() == ["chemistry", "3", "33.00", "12.00", "0.4", "75.0", "42"]
    assert usage(*OCTOBER, "-A", "Chemistry", "--by", "account", "-n")[1] == out, "in any case, as in sreport"


@pytest.mark.parametrize("user", ["nosuch", "4000000", "9" * 30, "²"])
@pytest.mark.parametrize("command", [["usage"], ["waste"], ["report", "--html", "x.html"]])
def test_unknown_user_is_an_error(
    usage: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    command: list[str], user: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code = run_command(cli, "migbatch", (*command, "-u", f"alice,{user}", *OCTOBER))
    assert (code, capsys.readouterr()) == (1, ("", f"migbatch: error: Invalid user id: {user}\n"))
    assert not list(tmp_path.iterdir())


def test_a_window_in_the_future_has_no_usage(usage: Cli) -> None:
    code, out, _ = usage("-S", "tomorrow", "-E", "now+3days", "--json")
    found = json.loads(out)
    assert (code, found["rows"]) == (0, [])
    assert (found["total"]["jobs"], found["total"]["gpu_hours"]) == (0, 0)


def rows(usage: Cli, *arguments: str) -> dict[tuple[str, ...], dict[str, Any]]:
    found = json.loads(usage(*arguments, "--json")[1])
    return {tuple(row[name] for name in found["by"]): row for row in found["rows"]}


def test_usage_can_be_grouped_by_node_and_profile(usage: Cli) -> None:
    found = rows(usage, *OCTOBER, "--by", "node,profile")
    hours = {keys: (row["jobs"], round(row["slice_hours"], 6)) for keys, row in found.items()}
    assert hours == {
        ("n1", "3g.40gb"): (1, 10.0), ("n1", "7g.80gb"): (1, 2.0), ("n1", "2g.20gb"): (1, 14.0),
        ("n2", "1g.10gb"): (3, 9.0),
    }  # fmt: skip


def test_run_counts_in_each_month_in_which_it_ran(usage: Cli) -> None:
    found = rows(usage, "-S", "2026-09-01", "-E", "2026-11-10", "--by", "month", "-u", "alice,carol")
    hours = {month: (row["jobs"], round(row["slice_hours"], 6)) for (month,), row in found.items()}
    # job 5 has not ended: one hour of October, nine days of November
    assert hours == {"2026-09": (1, 2.0), "2026-10": (4, 14.0), "2026-11": (1, 9 * 24.0)}


def test_a_total_counts_a_run_of_two_months_once(usage: Cli) -> None:
    found = json.loads(usage("-S", "2026-09-01", "-E", "2026-11-01", "--by", "month", "-A", "chemistry", "--json")[1])
    assert [row["jobs"] for row in found["rows"]] == [1, 3]
    assert found["total"]["jobs"] == 3


def test_percentage_is_of_the_capacity_of_the_requested_nodes(usage: Cli) -> None:
    found = json.loads(usage(*OCTOBER, "-N", "n2", "--by", "node", "--json")[1])
    assert found["percent_of"] == "capacity"
    # four GPUs since the 16th; October has 25 hours more than 30 days where clocks are put back
    hours = 4 * (at("11-01") - at("10-16")) / H
    assert found["rows"][0]["percent"] == pytest.approx(100 * (9 / 7) / hours)
    assert found["rows"][0]["slice_hours"] == pytest.approx(9), "slices on other nodes are left out"


def test_without_gpu_inventory_the_percentage_is_of_the_used_time(usage: Cli, database: str, tmp_path: Path) -> None:
    copy = tmp_path / "old.db"
    copy.write_bytes(Path(database.removeprefix("sqlite:///")).read_bytes())
    with closing(sqlite3.connect(copy)) as record, record:
        record.execute("delete from node_events where kind='inventory'")
        record.execute("update gpus set seen=?", (at("10-05"),))
        record.execute("update journals set forgotten=1")
    out = usage(*OCTOBER, "--db", f"sqlite:///{copy}", "--by", "account")[1]
    assert "percent of the used time (capacity is unknown)" in out
    assert "%USED" in out
    assert [line.split()[4] for line in out.splitlines()[2:]] == ["97.7", "2.3", "100.0"]


def test_capacity_is_known_if_an_unchanged_gpus_inventory_was_removed(
    usage: Cli, database: str, tmp_path: Path
) -> None:
    copy = tmp_path / "old.db"
    copy.write_bytes(Path(database.removeprefix("sqlite:///")).read_bytes())
    with closing(sqlite3.connect(copy)) as record, record:
        record.execute("delete from node_events where kind='inventory'")
        record.execute("update gpus set seen=?", (at("09-05"),))
        record.execute("update journals set forgotten=1")
    found = json.loads(usage(*OCTOBER, "--db", f"sqlite:///{copy}", "--json")[1])
    assert found["percent_of"] == "capacity"


def test_csv_and_parsable_hold_the_same_rows_without_a_total(usage: Cli) -> None:
    table = list(csv.DictReader(io.StringIO(usage(*OCTOBER, "--csv")[1])))
    assert [(row["account"], row["user"], row["jobs"]) for row in table] == [
        ("chemistry", "alice", "2"), ("chemistry", "bob", "1"), ("biology", "carol", "2"),
    ]  # fmt: skip
    assert float(table[0]["gpu_hours"]) == pytest.approx(7) and float(table[0]["idle_percent"]) == pytest.approx(75)
    assert table[1]["idle_percent"] == ""
    parted = usage(*OCTOBER, "-P", "-n")[1].splitlines()
    assert parted[0] == "chemistry|alice|2|12.00|7.00|0.2|75.0|71" and len(parted) == 3


def test_names_in_csv_cannot_be_spreadsheet_formulas(tmp_path: Path, usage: Cli) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    with open_store(url) as store:
        node = Node(store)
        node.send(describe(node, at("09-01")))
        for job, account in enumerate(("=cmd|' /C calc'!A1", "@sum(1)", "+1", "plain", "a=b"), start=1):
            run(store, node, job, at("10-02T10:00"), at("10-02T20:00"), account=account)
    table = list(csv.reader(io.StringIO(usage(*OCTOBER, "--by", "account", "--csv", "-n", "--db", url)[1])))
    assert {row[0] for row in table} == {"'=cmd|' /C calc'!A1", "'@sum(1)", "'+1", "plain", "a=b"}
    assert {row[1] for row in table} == {"1"}
    parted = usage(*OCTOBER, "--by", "account", "-P", "-n", "--db", url)[1].splitlines()
    assert {"@sum(1)", "+1"} <= {line.partition("|")[0] for line in parted}


def test_numbers_and_a_lone_sign_in_csv_are_unchanged() -> None:
    assert csv_line([-1, -0.5, "-", "", "-5x", "\t=1"]) == "-1,-0.5,-,,'-5x,'\t=1"


def test_window_without_held_slices_is_no_error(usage: Cli) -> None:
    code, out, _ = usage("-S", "2020-01-01", "-E", "2020-02-01", "-n")
    assert (code, out.split()) == (0, ["total", "0", "0.00", "0.00", "not", "sampled", "0"])
    assert json.loads(usage("-S", "2020-01-01", "-E", "2020-02-01", "--json")[1])["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--by", "colour"), "--by 'colour': write some of user, account"),
        (("-S", "never"), "Invalid time specification (pos=0): never"),
        (("-S", "1990-01-01", "--by", "month"), "up to 240 months"),
        (("-S", "now", "-E", "now-1day"), "-E must be later than -S"),
        (("-N", "n[1"), "-N: "),
    ],
)
def test_bad_values_exit_with_2_and_a_message(usage: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = usage(*arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_usage_agrees_with_a_plain_sql_query(usage: Cli, tmp_path: Path, seed: int) -> None:
    """Random runs, and an SQL statement over leases and runs, clipped in Python."""
    chance = random.Random(seed)
    path = tmp_path / "x.db"
    start, end = at("10-01"), at("11-01")
    with open_store(f"sqlite:///{path}") as store:
        nodes = [Node(store, f"n{n}", f"j{n}") for n in range(3)]
        for job in range(1, 60):
            began = chance.uniform(start - 90 * H, end + 20 * H) // 1
            ended = None if chance.random() < 0.1 else began + chance.expovariate(1 / (20 * H)) // 1 + 1
            node, profile = chance.choice(nodes), chance.choice(list(SHARES))
            slices = [
                slice_entry(0, SIZES[profile], profile, f"GPU-{job}-{n}") for n in range(chance.choice((1, 1, 3)))
            ]
            sm = chance.random()
            seen = {"activity": {"seconds": 1.0, "sm": sm, "tensor": 0, "dram": 0}} if chance.random() < 0.6 else {}
            who = {"user": chance.choice("ab"), "account": chance.choice(("x", "y"))}
            run(store, node, job, began, ended, *slices, **who, **seen)
    expected: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    with closing(sqlite3.connect(path)) as record:
        sql = (
            "select r.account, l.node, l.profile, r.started, r.ended, json_extract(r.measured_facts, '$.sm') "
            "from runs r join leases l on l.run_id = r.id"
        )
        for account, node_name, profile, started, until, busy in record.execute(sql):
            hours = (min(until or at("11-15"), end) - max(started, start)) / H
            if hours > 0:
                gpu = hours * SHARES[profile]
                sums = expected[account, node_name]
                found = (hours, gpu, gpu if busy is not None else 0.0, gpu * (1 - busy) if busy is not None else 0.0)
                expected[account, node_name] = [a + b for a, b in zip(sums, found, strict=True)]
    found_rows = rows(usage, *OCTOBER, "--db", f"sqlite:///{path}", "--by", "account,node")
    assert found_rows.keys() == expected.keys()
    for keys, (hours, gpu, sampled, idle) in expected.items():
        row = found_rows[keys]
        assert row["slice_hours"] == pytest.approx(hours) and row["gpu_hours"] == pytest.approx(gpu)
        assert row["sampled_percent"] == pytest.approx(100 * sampled / gpu)
        assert row["idle_percent"] == (pytest.approx(100 * idle / sampled) if sampled else None)


@pytest.mark.parametrize("accounts", [(), ("chemistry",)])
def test_report_page_shows_the_same_hours(usage: Cli, database: str, accounts: tuple[str, ...]) -> None:
    start, end = at("10-01"), at("11-01")
    wanted = RunFilter(start=start, end=end, accounts=accounts, duplicates=True)
    with closing(open_reader(database)) as record:
        held = SliceColumns.of(windows.held_slices(record, wanted), end)
    drawn = {use.name: use for use in use_by_account(held, TimeBins.over(start, end, 60))}
    found = rows(usage, *OCTOBER, "--by", "account", *(("-A", ",".join(accounts)) if accounts else ()))
    assert drawn.keys() == {account for (account,) in found}
    for (account,), row in found.items():
        use = drawn[account]
        assert use.total == pytest.approx(row["gpu_hours"])
        assert use.idle_share == (None if row["idle_percent"] is None else pytest.approx(row["idle_percent"] / 100))


def test_only_the_usage_command_imports_pandas(database: str) -> None:
    check = (
        "import sys\n"
        "from slurm_migbatch.cli.common import run\n"
        "from slurm_migbatch.cli.main import cli\n"
        "run(cli, 'migbatch', sys.argv[1:])\n"
        "print('pandas' in sys.modules, file=sys.stderr)\n"
    )

    def imports(*arguments: str) -> str:
        line = [sys.executable, "-c", check, *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=True).stderr

    assert imports("usage", "--db", database) == "True\n"
    assert imports("usage", "--help") == imports("show", "--help") == "False\n"
