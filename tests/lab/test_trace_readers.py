"""Trace readers on tiny synthetic files, valid and invalid ones."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.sim.job import SimulatedJob
from slurm_migbatch.lab.traces import (
    csvlines,
    joblog,
    jobtable,
    mixed,
    muri,
    openb,
    philly,
    pollux,
    requests,
    sacct,
)
from slurm_migbatch.lab.traces.csvlines import TraceError
from slurm_migbatch.lab.traces.trace import Trace
from slurm_migbatch.mig.profile import Profile

A100 = geometry("a100-80gb")
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(text: str, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path

    return make


WRONG = "{} lines or jobs that are wrong are skipped, the first: {}"


def skipped(read: Callable[[str], Trace], text: str, row: str) -> tuple[str, ...]:
    """Return what is told of a wrong row after others, beside what is told of these; the jobs are the same."""
    without, trace = read(text), read(text + row)
    assert trace.jobs == without.jobs
    return tuple(notice for notice in trace.notices if notice not in without.notices)


PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,a
2017-10-09 06:13:03,2951.0,4,11804.0,b
"""
HELIOS_LOG = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
7,u1,vc8,16,96,2,COMPLETED,2020-04-01 00:10:00,2020-04-01 00:10:09,2020-04-01 00:11:09,60,9
5,u2,vc8,1,6,1,FAILED,2020-04-01 00:00:00,2020-04-01 00:00:01,2020-04-01 00:00:31,30,1
8,u1,vcserve,0,6,1,COMPLETED,2020-04-01 00:20:00,2020-04-01 00:20:00,2020-04-01 00:20:05,5,0
9,u1,vcserve,2,6,1,CANCELLED,2020-04-01 00:20:00,,,0,0
"""
ACME = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
abc,u5,8,64,960,Pretrain,COMPLETED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,,100,10,6400
abd,u5,1,1,9,Evaluation,RUNNING,2023-05-17 11:00:59+00:00,2023-05-17 11:01:08+00:00,,100,10,100
"""
PAI = """job_id,num_inst,submit_time,num_cpu,num_gpu,gpu_type,duration,user
3,1,120,6,0.25,T4,600,a
1,4,60,6,0.5,T4,30,b
2,2,61,6,8.0,V100,30,b
4,1,61,6,0.0,CPU,30,b
"""
SPOT = """job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
239,13,A10,20,1,1,0,2764799,HP
437,57,A100-SXM4-80GB,15,1,16,9589663,41060,Spot
"""
PM100 = """job_id,job_state,nodes,num_gpus_alloc,num_nodes_alloc,run_time,submit_time,time_limit,user_id
4,COMPLETED,"[12, 15]",8,2,600,2020-05-07 11:45:30+00:00,60,52
5,COMPLETED,[12],0,1,600,2020-05-07 11:45:31+00:00,60,52
6,RUNNING,[12],4,1,600,2020-05-07 11:45:32+00:00,60,52
"""


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_philly_is_sorted_and_begins_at_its_first_submission(write: Write, name: str) -> None:
    first, second = joblog.read(write(PHILLY, name)).jobs
    assert (first.arrival, first.work, first.gpus, first.user) == (0, 2951, 4, "b")
    assert (second.arrival, second.work, second.gpus, second.user) == (2932, 66, 1, "a")
    assert (first.id, second.id) == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "is empty; its first line should name submit_time or timestamp, duration or run_time or end_time, "
            "gpu_num or num_gpus or num_gpu or gpu_request or num_gpus_alloc",
        ),
        (
            "timestamp,duration,gpus,cluster\n",
            ":1: lacks the columns gpu_num or num_gpus or num_gpu or gpu_request or num_gpus_alloc; "
            "found timestamp, duration, gpus, cluster; rename those in this line that mean the same, or name them in "
            'workload.columns (trace = "joblog")',
        ),
    ],
)
def test_invalid_line_is_named_in_the_error(write: Write, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(TraceError) as caught:
        joblog.read(path)
    assert str(caught.value) == f"{path}{message if message.startswith(':') else ': ' + message}"


@pytest.mark.parametrize(
    ("text", "row", "why"),
    [
        (PHILLY, "2017-10-09 06:13:03,x,1,1,b", "duration must be a number, not 'x'"),
        (PHILLY, "2017-10-09 06:13:03,-1,1,1,b", "duration must be 0 or more, not -1"),
        (PHILLY, "2017-10-09 06:13:03,inf,1,1,b", "duration must be 0 or more, not inf"),
        (PHILLY, "2017-10-09 06:13:03,1,-1,1,b", "num_gpus must be between 0 and 1e+06, not -1"),
        (PHILLY, "2017-10-09 06:13:03,1,1.5,1,b", "num_gpus must be a share of one GPU or a whole number, not 1.5"),
        (PHILLY, "1507532515,1,1,1,b", "timestamp must be a time such as 2017-10-09 07:01:55, not '1507532515'"),
        (SPOT, "9,1,A10,1,1,1,2017-10-09 06:13:03,5,HP", "submit_time must be a number, not '2017-10-09 06:13:03'"),
        (PHILLY, "yesterday,1,1,1,b", "timestamp must be a time such as 2017-10-09 07:01:55, not 'yesterday'"),
        (PHILLY, "2017-10-09 06:13:03,1,1", "has 3 cells, the header has 5"),
    ],
)
def test_wrong_line_of_a_log_is_skipped_and_told_and_a_log_of_them_is_refused(
    write: Write, text: str, row: str, why: str
) -> None:
    assert skipped(lambda text: joblog.read(write(text)), text, f"{row}\n") == (WRONG.format(1, f"line 4: {why}"),)
    path = write(f"{text}{row}\n{row}\n")
    with pytest.raises(TraceError) as caught:
        joblog.read(path)
    assert str(caught.value) == f"{path}:4: {why}; 2 lines or jobs are wrong, 2 can be read"


@pytest.mark.parametrize("unknown", ["", "NULL", "nan", "NaN", "NaT", "None", r"\N"])
def test_unknown_duration_or_number_of_gpus_is_no_wrong_value(write: Write, unknown: str) -> None:
    rows = f"2017-10-09 06:13:03,{unknown},1,1,b\n2017-10-09 06:13:03,1,{unknown},1,b\n" * 2
    trace = joblog.read(write(PHILLY + rows))
    assert trace.jobs == joblog.read(write(PHILLY)).jobs
    assert trace.notices == (
        "2 jobs that have not run or not ended are skipped",
        "2 jobs without a GPU are skipped",
    )


def test_unreadable_files_are_named_in_the_error(write: Write, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: cannot be read: No such file"):
        joblog.read(tmp_path / "none.csv")
    broken = write(PHILLY, "broken.csv.gz")
    broken.write_bytes(broken.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"broken\.csv\.gz: cannot be read"):
        joblog.read(broken)
    plain = write(PHILLY, "plain.csv")
    with pytest.raises(TraceError, match=r"named\.csv\.gz: cannot be read: Not a gzipped file"):
        joblog.read(plain.rename(tmp_path / "named.csv.gz"))
    latin = tmp_path / "latin.csv"
    latin.write_bytes(PHILLY.encode() + b"2017-10-09 06:13:03,1,1,1,\xe9\n")
    with pytest.raises(TraceError, match=r"latin\.csv: is not UTF-8 text: save it in UTF-8 \(not UTF-16 or Latin-1\)"):
        joblog.read(latin)


def test_gzipped_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    for text, read in ((PHILLY, joblog.read), (SACCT, sacct.read), (json.dumps({"jobs": [json_job()]}), sacct.read)):
        packed, plain = tmp_path / "packed.csv", tmp_path / "plain.csv"
        packed.write_bytes(gzip.compress(text.encode()))
        plain.write_text(text)
        assert read(packed) == read(plain)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named_in_the_error(tmp_path: Path, encoding: str) -> None:
    for text, read in ((PHILLY, joblog.read), (SACCT, sacct.read), (json.dumps({"jobs": [json_job()]}), sacct.read)):
        for name, pack in (("plain.csv", bytes), ("packed.csv.gz", gzip.compress)):
            path = tmp_path / name
            path.write_bytes(pack(text.encode(encoding)))
            with pytest.raises(
                TraceError, match=rf"{name}: is not UTF-8 text: save it in UTF-8 \(not UTF-16 or Latin-1\)"
            ):
                read(path)


def test_other_compression_is_named_in_the_error(tmp_path: Path) -> None:
    zstd = b"\x28\xb5\x2f\xfd\x04\x58\x15\x19\x00\xa2\xa1\x9f"  # the beginning of a frame
    path = tmp_path / "trace"
    for packed in (bz2.compress(SACCT.encode()), lzma.compress(SACCT.encode()), zstd):
        path.write_bytes(packed)
        for read in (sacct.read, joblog.read, jobtable.read, openb.read, philly.read):
            with pytest.raises(TraceError, match=r"trace: is not UTF-8 text: .* compressed with gzip only"):
                read(path, *((A100,) if read is openb.read else ()))


def test_parquet_is_named_in_the_error_with_the_way_to_write_it_as_csv(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"PAR1\x15\x04\x15\x20" + bytes(range(256)) + b"PAR1")
    for read in (sacct.read, joblog.read, jobtable.read, openb.read, philly.read):
        with pytest.raises(TraceError, match=r"trace: is Parquet, .*: write it as CSV, .*read_parquet"):
            read(path, *((A100,) if read is openb.read else ()))


def test_time_zone_of_a_timestamp_is_respected(write: Write) -> None:
    zones = PHILLY.replace("07:01:55,", "07:01:55+02:00,").replace("06:13:03,", "06:01:55Z,")
    first, second = joblog.read(write(zones)).jobs
    assert (first.user, second.user, second.arrival) == ("a", "b", 3600)
    # as PostgreSQL, BigQuery and `date -Iseconds` of some systems print them
    for zone, offset in (("+00", 0), (" UTC", 0), ("+0530", 19800), ("-03", -10800)):
        assert csvlines.moment(f"2017-10-09 07:01:55{zone}") == csvlines.moment("2017-10-09T07:01:55Z") - offset
    days = PHILLY.replace("2017-10-09 07:01:55,", "2017-10-10,").replace("06:13:03,", "23:59:59.5+00:00,")
    assert [job.arrival for job in joblog.read(write(days)).jobs] == [0, 0.5]
    for wrong in ("2017-10-09 07:01:55.5e3", "2017-10-09 07:01:55.nan", "2017-10-09+02:00"):
        with pytest.raises(TraceError, match=":2: timestamp must be a time such as"):
            joblog.read(write(PHILLY.replace("2017-10-09 07:01:55", wrong)))


def test_byte_order_mark_is_ignored(write: Write) -> None:
    assert len(joblog.read(write("\ufeff" + PHILLY)).jobs) == 2
    assert len(sacct.read(write("\ufeff" + SACCT)).jobs) == len(sacct.read(write(SACCT)).jobs)


def test_a_column_that_occurs_twice_is_refused(write: Write) -> None:
    with pytest.raises(TraceError, match=":1: has the columns duration more than once"):
        joblog.read(write(PHILLY.replace("gpu_time", "duration")))
    assert len(joblog.read(write(PHILLY.replace("gpu_time", "extra"))).jobs) == 2


def test_job_logs_are_read_by_column_name(write: Write) -> None:
    helios_log = joblog.read(write(HELIOS_LOG, "cluster_log.csv"))
    assert helios_log.jobs == (
        SimulatedJob(0, "5", 0.0, 30.0, gpus=1, user="u2"),
        SimulatedJob(1, "7", 600.0, 60.0, gpus=16, user="u1"),
    )
    assert helios_log.notices == (
        "1 jobs without a GPU are skipped",
        "1 jobs that have not run or not ended are skipped",
    )
    assert joblog.read(write(ACME)).jobs == (SimulatedJob(0, "abc", 0.0, 100.0, gpus=64, user="u5"),)
    pai = joblog.read(write(PAI), A100).jobs
    assert pai == (
        SimulatedJob(0, "1", 0.0, 30.0, gpus=4, profile=Profile.parse("4g.40gb"), user="b"),
        SimulatedJob(1, "2", 1.0, 30.0, gpus=16, user="b"),
        SimulatedJob(2, "3", 60.0, 600.0, gpus=1, profile=Profile.parse("2g.20gb"), user="a"),
    )
    assert [job.profile for job in joblog.read(write(PAI)).jobs] == [None, None, None]
    served, spot = joblog.read(write(SPOT), A100, ["HP"]).jobs
    assert (served.kind, served.user, served.gpus) == ("infer", "13", 1)
    assert (spot.kind, spot.arrival, spot.gpus) == ("train", 9589663.0, 16)
    pm100 = joblog.read(write(PM100))
    assert pm100.jobs == (SimulatedJob(0, "4", 0.0, 600.0, gpus=8, user="52", estimate=3600.0),)
    assert pm100.notices == ("1 jobs without a GPU are skipped", "1 jobs that have not run or not ended are skipped")


CINECA = """,eligible_time,end_time,job_id,job_state,num_gpus_alloc,run_time,start_time,submit_time,time_limit,user_id
0,2020-05-05 01:00:00+00:00,2020-05-05 02:00:10,7,COMPLETED,4,600,2020-05-05 01:50:10,2020-05-05 00:00:00,1440,5
1,2020-05-05 01:00:01+00:00,2020-05-05 02:00:10,8,COMPLETED,4,600,2020-05-05 01:50:10,2020-05-05 01:00:00,INFINITE,5
2,,2020-05-05 02:00:10,9,COMPLETED,1,600,2020-05-05 01:50:10,2020-05-05 01:00:02+00:00,4294967294.0,5
"""


def test_eligible_times_and_limits_of_cinecas_tables_are_slurms(write: Write) -> None:
    later = "1 jobs arrive when they became eligible: they were held, had dependencies or a begin time"
    trace = joblog.read(write(CINECA))
    assert [(job.name, job.arrival, job.gpus, job.estimate) for job in trace.jobs] == [
        ("7", 0, 4, 86400), ("8", 1, 4, None), ("9", 2, 1, None),
    ]  # fmt: skip
    assert trace.notices == (later,)
    head, *rows = CINECA.replace("num_gpus_alloc", "tres_alloc_str").splitlines()
    held = ('"cpu=8,gres/gpu:a100=2,gres/gpu=2"', '"cpu=1,gres/gpu:a100_3g.39gb=1"', '"cpu=1,mem=1G"')
    m100 = [row.replace("COMPLETED,4", f"COMPLETED,{tres}").replace("COMPLETED,1", f"COMPLETED,{tres}")
            for row, tres in zip(rows, held, strict=True)]  # fmt: skip
    trace = joblog.read(write("\n".join([head, *m100])), A100)
    assert [(job.gpus, job.profile, job.estimate) for job in trace.jobs] == [
        (2, None, 86400), (1, Profile.parse("3g.40gb"), None),
    ]  # fmt: skip
    assert trace.notices == ("1 jobs without a GPU are skipped", later)


def test_limit_of_a_log_is_read_where_its_unit_is_known(write: Write) -> None:
    rows = "1,0,60,1,1-00:00:00\n2,1,60,1,02:00:00\n3,2,60,1,90\n4,3,60,1,\n"
    trace = joblog.read(write(f"job_id,submit_time,duration,gpu_num,time_limit\n{rows}"))
    assert [job.estimate for job in trace.jobs] == [86400, 7200, None, None]
    assert trace.notices == (
        "1 jobs have a number as time_limit, whose unit is not known: it is not read; write 1-02:03:04",
    )
    nrel = "job_id,submit_time,run_time,gpus_requested,wallclock_req\n1,0,60,2,7200\n"
    assert [(job.gpus, job.estimate) for job in joblog.read(write(nrel)).jobs] == [(2, 7200)]


def test_instances_of_recommendation_models_are_jobs_of_their_application(write: Write) -> None:
    log = (
        "instance_sn,role,app_name,cpu_request,gpu_request,rdma_request,creation_time,scheduled_time,deletion_time\n"
        "instance_1,HN,app_0,12,1,25,,,\n"
        "instance_2,CN,app_0,12,0,25,1435629.0,1435629.0,1435760.0\n"
        "instance_3,HN,app_0,12,1,25,1435629.0,1435639.0,1435760.0\n"
    )
    trace = joblog.read(write(log), A100, ["HN"])
    assert trace.jobs == (SimulatedJob(0, "instance_3", 0.0, 121.0, "infer", user="app_0"),)
    assert trace.notices == (
        "1 jobs that have not run or not ended are skipped",
        "1 jobs without a GPU are skipped",
    )


def test_tasks_of_pai_arrive_when_they_started_with_a_notice(write: Write) -> None:
    log = (
        "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
        "a,tensorflow,1.0,Terminated,1739162.0,1739200.0,600.0,29.3,50.0,MISC\n"
        "b,worker,4.0,Failed,1739163.0,1739300.0,600.0,29.3,100.0,V100\n"
        "b,ps,2.0,Failed,1739163.0,1739300.0,600.0,29.3,,\n"
        "c,worker,1.0,Running,1739164.0,,600.0,29.3,200.0,V100\n"
    )
    trace = joblog.read(write(log, "pai_task_table.csv"), A100)
    assert [(job.name, job.arrival, job.work, job.gpus, job.profile) for job in trace.jobs] == [
        ("a", 0, 38, 1, Profile.parse("4g.40gb")), ("b", 1, 137, 4, None),
    ]  # fmt: skip
    assert trace.notices == (
        "1 jobs without a GPU are skipped",
        "1 jobs that have not run or not ended are skipped",
        "jobs arrive at their start_time, as the log has no times of submission",
    )


def test_columns_of_a_log_may_be_named_by_the_user(write: Write) -> None:
    log = write("id,queued,gpus,time,gpu_num\n1,5,2,60,0\n2,9,1,70,0\n")
    names = {"queued": "submit_time", "gpus": "gpu_num", "time": "duration", "id": "job_id"}
    trace = joblog.read(log, columns=names)
    assert [(job.name, job.arrival, job.gpus, job.work) for job in trace.jobs] == [("1", 0, 2, 60), ("2", 4, 1, 70)]
    with pytest.raises(
        TraceError, match=r":1: lacks the columns submit_time or timestamp, .*, or name them in workload\.columns"
    ):
        joblog.read(log)
    with pytest.raises(TraceError, match=r":1: lacks the columns gpu of workload\.columns; found id, queued, gpus"):
        joblog.read(log, columns={"gpu": "gpu_num"})


@pytest.mark.parametrize(
    "state",
    ["REQUEUED", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "BOOT_FAIL", "DEADLINE", "CANCELLED by 1234"],
)
def test_log_rows_that_have_run_are_jobs_whatever_their_end(write: Write, state: str) -> None:
    (job,) = joblog.read(write(f"job_id,user,gpu_num,state,submit_time,duration\n1,u,1,{state},0,60\n")).jobs
    assert job.work == 60.0
    for unfinished in ("RUNNING", "COMPLETING"):
        log = write(f"job_id,user,gpu_num,state,submit_time,duration\n1,u,1,{unfinished},0,60\n")
        assert not joblog.read(log).jobs


LOG = "job_id,submit_time,start_time,end_time,gpu_num"


def test_log_without_durations_has_the_times_from_start_to_end(write: Write) -> None:
    rows = "1,2024-01-01T00:00:00,2024-01-01T00:01:00,2024-01-01T01:01:00,2\n2,2024-01-01T00:00:00,,,1\n"
    trace = joblog.read(write(f"{LOG}\n{rows}3,2024-01-01 00:00:05,1704067300,1704067310,1\n"))
    assert [(job.name, job.arrival, job.work, job.gpus) for job in trace.jobs] == [("1", 0, 3600, 2), ("3", 5, 10, 1)]
    assert trace.notices == ("1 jobs that have not run or not ended are skipped",)
    with pytest.raises(TraceError, match=":2: end_time is before start_time"):
        joblog.read(write(f"{LOG}\n1,0,70,60,1\n"))
    with pytest.raises(TraceError, match=":1: lacks the column start_time, or one with durations"):
        joblog.read(write("job_id,submit_time,end_time,gpu_num\n1,0,60,1\n"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04.5", 7384.5),
        ("1 days 02:03:04", 93784),
        ("0 days 00:00:09.000000", 9),
        ("27:00:00", 97200),
    ],
)
def test_durations_of_a_log_may_be_those_of_slurm_and_pandas(write: Write, text: str, seconds: float) -> None:
    log = f"job_id,submit_time,run_time,gpu_num\n1,0,{text},1\n"
    assert [job.work for job in joblog.read(write(log)).jobs] == [seconds]
    for ambiguous in ("02:03", "-1 days +02:03:04", "1:2:3"):
        with pytest.raises(TraceError, match=":2: run_time must be seconds, or a duration such as 1-02:03:04, not"):
            joblog.read(write(log.replace(text, ambiguous)))


def test_durations_of_a_log_in_another_unit_than_seconds_are_told(write: Write) -> None:
    rows = "1,0,10,3610,1,{0}\n2,0,10,7210,1,{1}\n3,0,,,1,{0}\n4,0,x,y,1,{0}\n"
    assert joblog.read(write(f"{LOG},duration\n{rows.format(3600, 7200)}")).notices == ()
    few = "1,0,10,3610,1,3600\n2,0,10,3610,1,3600\n" + "3,0,10,3610,1,60\n" * 2
    assert joblog.read(write(f"{LOG},duration\n{few}")).notices == ("1 repeated lines are skipped",)
    (notice,) = joblog.read(write(f"{LOG},duration\n{rows.format(60, 120)}5,0,10,130,1,2\n")).notices
    assert notice == (
        "duration is used, which is mostly not the time from start_time to end_time "
        "(line 2: 60 and 3600 s): it must be in seconds"
    )


@pytest.mark.parametrize(("column", "whole"), [("gpu_milli", 1000), ("gpu_percent", 100)])
def test_shares_of_a_gpu_in_a_column_of_their_own_are_no_whole_gpus(write: Write, column: str, whole: int) -> None:
    log = f"job_id,submit_time,duration,num_gpu,{column}\n"
    rows = f"1,0,60,1,{whole // 4}\n2,0,60,1,{whole}\n3,0,60,4,{whole}\n4,0,60,1,\n5,0,60,0,{whole}\n6,0,60,1,0\n"
    trace = joblog.read(write(log + rows), A100)
    assert [(job.name, job.gpus, job.profile) for job in trace.jobs] == [
        ("1", 1, Profile.parse("2g.20gb")), ("2", 1, None), ("3", 4, None), ("4", 1, None),
    ]  # fmt: skip
    assert trace.notices == ("2 jobs without a GPU are skipped",)
    for wrong, why in (
        (f"2,{whole // 2}", f"must be {whole} for a job with 2 GPUs, not {whole // 2}"),
        (f"1,{2 * whole}", f"must be between 0 and {whole}, not {2 * whole}"),
    ):
        with pytest.raises(TraceError, match=f":2: {column} {why}"):
            joblog.read(write(f"{log}1,0,60,{wrong}\n"), A100)


def test_shares_of_a_gpu_without_slices_are_told(write: Write) -> None:
    log = write("job_id,submit_time,duration,num_gpu\n1,0,60,0.5\n2,0,60,1\n")
    assert joblog.read(log, A100).notices == ()
    trace = joblog.read(log)
    assert [(job.gpus, job.profile) for job in trace.jobs] == [(1, None), (1, None)]
    assert trace.notices == ("1 jobs with a share of a GPU are replayed on whole GPUs",)


def test_repeated_lines_of_a_log_with_names_count_once(write: Write) -> None:
    log = "job_id,submit_time,duration,num_gpu,user\n1,0,60,1,u\n1,70,60,1,u\n2,0,60,1,u\n"
    trace = joblog.read(write(log + log))
    assert [job.name for job in trace.jobs] == ["1", "2", "1"], "a run after a requeue has another time"
    assert trace.notices == ("3 repeated lines are skipped",)
    nameless = "submit_time,duration,num_gpu\n0,60,1\n0,60,1\n"
    assert len(joblog.read(write(nameless)).jobs) == 2


def test_shares_of_a_gpu_in_an_unknown_unit_are_refused(write: Write) -> None:
    log = "job_id,submit_time,duration,num_gpu,{}\n1,0,60,1,0.5\n"
    for column in ("gpu_fraction", "GPU share", "mps", "gres_shard", "gpu_mem_percent"):
        with pytest.raises(
            TraceError, match=f":1: has the column {column}, which is not read: .* into num_gpu, 0.5 for"
        ):
            joblog.read(write(log.format(column)))
    for column in ("timestamps", "gpu_utilization_percent", "shared", "gpu_type"):
        assert len(joblog.read(write(log.format(column))).jobs) == 1


def test_log_may_begin_with_a_job_without_a_time(write: Write) -> None:
    log = write("job_id,gpu_num,state,submit_time,duration\n1,1,PENDING,,\n2,1,COMPLETED,10,60\n3,0,COMPLETED,,5\n")
    assert [job.name for job in joblog.read(log).jobs] == ["2"]


def test_times_in_milliseconds_are_refused_where_they_are_in_seconds(write: Write) -> None:
    log = write("job_id,gpu_num,submit_time,duration\n1,1,1585699201,3600\n2,1,1585699261000,60\n")
    with pytest.raises(TraceError, match=r":3: submit_time must be in seconds, not 1585699261000: .*divide it by 1000"):
        joblog.read(log)
    for column, old in (("time_submit", "60,1000,"), ("time_start", "1000,1100,"), ("time_end", "1100,1400,")):
        new = old.replace(old.split(",")[-2], "1585699201000")
        head, row, _ = JOBTABLE.replace(old, new, 1).split("\n", 2)
        with pytest.raises(TraceError, match=f":2: {column} must be in seconds, not 1585699201000"):
            jobtable.read(write(f"{head}\n{row}\n"))
    header = "name,time,application,num_replicas,batch_size,duration,num_task\n"
    with pytest.raises(TraceError, match=":2: time must be in seconds"):
        mixed.read(write(f"{header}a,1585699201000,net,1,1,10,0\n"))


PHILLY_LOG: list[dict[str, Any]] = [
    {
        "status": "Pass",
        "vc": "v",
        "jobid": "b",
        "user": "u",
        "submitted_time": "2017-10-09 00:10:00",
        "attempts": [
            {
                "start_time": "2017-10-09 01:00:00",
                "end_time": "2017-10-09 02:00:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}],
            },
            {"start_time": "2017-10-09 03:00:00", "end_time": "2017-10-09 03:00:30", "detail": []},
            {"start_time": "2017-10-09 04:00:00", "end_time": "None", "detail": []},
        ],
    },
    {"status": "Killed", "vc": "v", "jobid": "a", "submitted_time": "2017-10-09 00:00:00", "attempts": []},
]


def test_original_philly_json_log_is_read(write: Write, tmp_path: Path) -> None:
    trace = philly.read(write(json.dumps(PHILLY_LOG), "cluster_job_log"))
    assert trace.jobs == (SimulatedJob(0, "b", 0.0, 3630.0, gpus=3, user="u"),)
    assert trace.notices == ("1 jobs without a GPU are skipped",)
    endless: dict[str, Any] = {**PHILLY_LOG[0], "jobid": "c"}
    endless["attempts"] = [{"start_time": "2017-10-09 01:00:00", "detail": PHILLY_LOG[0]["attempts"][0]["detail"]}]
    log = [{**PHILLY_LOG[0], "attempts": [*PHILLY_LOG[0]["attempts"], *endless["attempts"]]}, endless]
    trace = philly.read(write(json.dumps(log), "cluster_job_log"))
    assert trace.jobs == (SimulatedJob(0, "b", 0.0, 3630.0, gpus=3, user="u"),)
    assert trace.notices == ("1 jobs that have not run or not ended are skipped",)
    assert philly.read(write(PHILLY)) == joblog.read(write(PHILLY))
    for text, reason in (
        ("{}", "must be a list of jobs"),
        ("[", "is not JSON"),
        ("[7]", "job 0 of the list: "),
        (json.dumps([{**PHILLY_LOG[1], "submitted_time": "soon"}]), "job 0 of the list: a time such as"),
        (json.dumps([{"jobid": "a"}]), "job 0 of the list: lacks 'attempts'"),
    ):
        with pytest.raises(TraceError, match=reason):
            philly.read(write(text, "cluster_job_log"))
    (nameless,) = philly.read(write(json.dumps([{**PHILLY_LOG[0], "user": None}]), "cluster_job_log")).jobs
    assert nameless.user == "v"
    late = {**PHILLY_LOG[0], "jobid": "d", "submitted_time": "soon"}
    trace = philly.read(write(json.dumps([*PHILLY_LOG, PHILLY_LOG[0], late]), "cluster_job_log"))
    assert [job.name for job in trace.jobs] == ["b", "b"]
    assert trace.notices[-1].startswith(WRONG.format(1, "job 3 of the list: a time such as"))
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        philly.read(tmp_path / "none")


OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
old,1,1,1,1000,,LS,Running,0,9999999,0
half,1,1,1,500,,BE,Running,9072010,9072110,9072020
small,1,1,1,140,,LS,Running,9072001,9072110,9072010
whole,1,1,2,1000,,Burstable,Running,9072000,9072300,9072100
cpu,1,1,0,0,,LS,Running,9072000,9072300,9072100
never,1,1,1,500,,LS,Pending,9072000,9072300,
"""


def test_openb_pods_from_day_105_on_become_jobs_with_profiles(write: Write) -> None:
    trace = openb.read(write(OPENB), A100)
    whole, small, half = trace.jobs
    assert (whole.name, whole.arrival, whole.work, whole.gpus, whole.profile, whole.kind) == (
        "whole", 0, 200, 2, None, "infer",
    )  # fmt: skip
    assert (small.arrival, small.work, small.profile, small.kind) == (1, 100, Profile.parse("1g.20gb"), "infer")
    assert (half.arrival, half.profile, half.kind) == (10, Profile.parse("4g.40gb"), "train")
    assert trace.notices == (
        "1 pods that request no GPU are skipped",
        "1 pods that were never scheduled are skipped",
        "1 pods that came before day 105 are skipped",
    )


def test_openb_extract_without_later_pods_begins_at_its_first_day(write: Write) -> None:
    head, old, *_ = OPENB.splitlines()
    late = "late,1,1,1,500,,BE,Running,3600,4600,4000"
    trace = openb.read(write("\n".join([head, old, late]) + "\n"), A100)
    assert [(job.name, job.arrival) for job in trace.jobs] == [("old", 0), ("late", 3600)]
    assert trace.notices == ()


def test_pods_without_a_run_time_are_skipped_and_counted_by_reason(write: Write) -> None:
    more = "runs,1,1,1,500,,LS,Running,9072000,,9072100\nback,1,1,1,500,,LS,Failed,9072000,9072100,9072100\n"
    trace = openb.read(write(OPENB + more), A100)
    assert trace.jobs == openb.read(write(OPENB), A100).jobs
    assert trace.notices[1:4] == (
        "1 pods that were never scheduled are skipped",
        "1 pods that have not ended are skipped",
        "1 pods that ended before they began are skipped",
    )


def test_gpu_share_becomes_the_smallest_profile_with_that_compute_and_memory() -> None:
    shares = {0.12: "1g.10gb", 1 / 7: "1g.20gb", 0.25: "2g.20gb", 0.42: "3g.40gb", 0.5: "4g.40gb", 0.6: None}
    for share, name in shares.items():
        assert openb.slice_of(A100, share) == (Profile.parse(name) if name else None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x,1,1,2,500,,LS,Running,9072000,9072300,9072100", "a pod with 2 GPUs uses whole ones"),
        ("x,1,1,1,0,,LS,Running,9072000,9072300,9072100", "gpu_milli must be between 1 and 1000, not 0"),
        ("x,1,1,1,1001,,LS,Running,9072000,9072300,9072100", "gpu_milli must be between 1 and 1000, not 1001"),
        ("x,1,1,1,500,,LS,Running,soon,9072300,9072100", "creation_time must be a number"),
    ],
)
def test_wrong_openb_row_is_skipped_and_told_and_a_file_of_them_is_refused(
    write: Write, row: str, message: str
) -> None:
    (notice,) = skipped(lambda text: openb.read(write(text), A100), OPENB, f"{row}\n")
    assert notice.startswith(WRONG.format(1, f"line 8: {message}"))
    with pytest.raises(TraceError, match=f":8: {message}.*; 6 lines or jobs are wrong, 4 can be read"):
        openb.read(write(OPENB + f"{row}\n" * 6), A100)


MURI = """job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,resource_time_0
1,8,1534000,1463,vgg16,16,281000,28000,214,82
0,8,0,10956,gpt2,4,5095000,91000,437,0.6
"""


def test_muri_times_are_in_milliseconds_and_iterations(write: Write) -> None:
    first, second = muri.read(write(MURI)).jobs
    assert (first.id, first.app, first.batch, first.gpus) == (0, "gpt2", 32, 8)
    assert first.work == pytest.approx(10956 * 0.437)
    assert first.claimed == 5095
    assert second.arrival == 1534
    with pytest.raises(TraceError, match=":4: iterations times iteration_time must be above 0 ms and finite"):
        muri.read(write(MURI + "9,8,0,10956,gpt2,4,5095000,91000,437,1e308\n".replace("437,1e308", "1e308,0.6")))
    with pytest.raises(TraceError, match=":4: job_id 0 occurs twice"):
        muri.read(write(MURI + "0,8,0,10956,gpt2,4,5095000,91000,437,0.6\n"))


@pytest.fixture
def profiles(write: Write, tmp_path: Path) -> dict[str, pollux.ApplicationProfile]:
    write(
        "placement,local_bsz,step_time,sync_time\n1,8,0.1,0.0\n1,16,0.2,0.0\n4,8,0.15,0.05\n4,8,0.17,0.07\n"
        "44,8,0.3,0.1\n",
        "traces/net/placements.csv.gz",
    )
    write("num_nodes,num_replicas,local_bsz,step_time,sync_time\n5,20,8,0.5,0.2\n", "traces/net/scalability.csv")
    write("progress,iteration,metric\n1,500,0.1\n2,1000,0.5\n", "traces/net/validation-8.csv.gz")
    write("progress,iteration,metric\n2,250,0.5\n", "traces/net/validation-32.csv.gz")
    (tmp_path / "traces" / "other").mkdir()
    return pollux.profiles(tmp_path / "traces")


def test_pollux_profiles_give_step_times_and_iteration_counts(profiles: dict[str, pollux.ApplicationProfile]) -> None:
    net = profiles["net"]
    assert list(profiles) == ["net"]
    assert net.step_s(1, 12) == pytest.approx(0.15)
    assert net.step_s(1, 4) == 0.1
    # three micro-steps of 16, with the exchange only in the last
    assert net.step_s(1, 48) == pytest.approx(0.6)
    assert net.step_s(4, 64) == pytest.approx(0.16 + 0.16 - 0.06)
    assert net.step_s(8, 64) == 0.3
    # 6 replicas were not measured: the next larger measured number is used
    assert net.step_s(6, 48) == 0.3
    assert net.iterations_of(8) == 1000
    assert net.iterations_of(16) == pytest.approx(500)
    assert net.seconds(1, 8) == pytest.approx(100)


def test_pollux_workloads_take_their_durations_from_profiles(
    write: Write, profiles: dict[str, pollux.ApplicationProfile], tmp_path: Path
) -> None:
    head = "name,time,application,num_replicas,batch_size\n"
    (job,) = pollux.read(write(head + "net-0,107,net,4,32\n"), profiles).jobs
    assert (job.name, job.arrival, job.gpus, job.app, job.batch) == ("net-0", 107, 4, "net", 32)
    assert job.work == pytest.approx(250 * 0.16)
    with pytest.raises(TraceError, match=":2: application 'bert' has no profile; there are net"):
        pollux.read(write(head + "x,1,bert,4,32\n"), profiles)
    with pytest.raises(TraceError, match=":2: net was not measured on 64 GPUs"):
        pollux.read(write(head + "x,1,net,64,32\n"), profiles)
    with pytest.raises(TraceError, match="holds no folders with placements"):
        pollux.profiles(tmp_path / "traces" / "other")


@pytest.mark.parametrize(
    ("source", "name", "text", "arrivals"),
    [
        (
            "Azure",
            "AzureLLMInferenceTrace_code.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.5000000,7,8\n"
            "2023-11-16 18:17:03,5,6\n2023-11-16 18:17:05,5,6\n",
            [0, 1.5, 2],
        ),
        (
            "Azure",
            "AzureLLMInferenceTrace_conv_1week.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.250000+00:00,7,8\n"
            "2024-05-10 00:00:00+00:00,5,6\n2024-05-10 00:00:01+00:00,5,6\n",
            [0, 0.25, 1],
        ),
        (
            "Mooncake",
            "mooncake_conversation_1h.csv",
            "timestamp_ms,input_tokens,output_tokens\n3000,9,1\n3000,8,1\n4500,7,2\n",
            [0, 0, 1.5],
        ),
        *(
            (
                "Mooncake",
                name,
                '{"timestamp": 3000, "input_length": 9, "output_length": 1, "hash_ids": [0, 1]}\n\n'
                '{"timestamp": 4500.0, "input_length": 7, "output_length": 2, "hash_ids": []}\n{"timestamp": 3000}\n',
                [0, 0, 1.5],
            )
            for name in ("mooncake_trace.jsonl", "conversation_trace.jsonl", "toolagent_trace.jsonl")
        ),
        (
            "Azure",
            "AzureLMMInferenceTrace_multimodal.csv",
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.5Z,1,9,1\n2024-10-15T12:00:00Z,0,9,1\n"
            "2024-10-15T12:00:02.25Z,1,9,1\n",
            [0, 0.5, 2.25],
        ),
        (
            "BurstGPT",
            "BurstGPT_1.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,API log\n118.5,GPT-4,4,7,11,API log\n",
            [0, 40, 113.5],
        ),
    ],
)
def test_request_traces_are_found_by_name_and_have_arrivals(
    tmp_path: Path, source: str, name: str, text: str, arrivals: list[float]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(text)
    assert requests.first_below(tmp_path) == (source, arrivals)


def test_request_trace_errors_name_the_line(write: Write) -> None:
    with pytest.raises(TraceError, match=":2: TIMESTAMP must be a time such as"):
        requests.read(write("TIMESTAMP,ContextTokens\n12,5\n"))
    with pytest.raises(TraceError, match=":1: lacks the columns TIMESTAMP or Timestamp or timestamp_ms"):
        requests.read(write("at,tokens\n12,5\n"))
    for text in ("{", "7", '{"at": 1}', '{"timestamp": -1}', '{"timestamp": NaN}', '{"timestamp": "x"}'):
        with pytest.raises(TraceError, match=':2: must be a JSON object with a "timestamp" in milliseconds'):
            requests.read(write(f'{{"timestamp": 1}}\n{text}\n', "mooncake_trace.jsonl"))


def test_request_traces_without_a_duration_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "mooncake_a.csv").write_text("timestamp_ms\n" + "3000\n" * 4)
    assert requests.first_below(tmp_path) is None


MIXED = """name,time,application,num_replicas,batch_size,duration,num_task
inference-bert-5,58,infer-bert-1,1,1,4.0,4927
net-0,10,net,4,32,4.0,-1
"""


def test_mixed_rows_with_tasks_are_inference(write: Write, profiles: dict[str, pollux.ApplicationProfile]) -> None:
    train, infer = mixed.read(write(MIXED)).jobs
    assert (infer.kind, infer.arrival, infer.work, infer.tasks, infer.app) == ("infer", 58, 4, 4927, "infer-bert-1")
    assert (train.kind, train.arrival, train.work, train.gpus, train.tasks) == ("train", 10, 4, 4, 0)
    train, infer = mixed.read(write(MIXED), profiles).jobs
    assert train.work == pytest.approx(250 * 0.16)
    assert infer.work == 4
    with pytest.raises(TraceError, match=":4: application 'x' has no profile"):
        mixed.read(write(MIXED + "n,1,x,1,1,1,-1\n"), profiles)
    with pytest.raises(TraceError, match=":4: duration must be above 0 s"):
        mixed.read(write(MIXED + "n,1,x,1,1,0,5\n"))


SACCT = """JobID|JobName|User|Partition|Submit|Start|End|Elapsed|Timelimit|State|ReqTRES|AllocTRES
101|train|ann|gpu|2026-01-05T10:00:00|2026-01-05T10:05:00|2026-01-05T11:05:00|01:00:00|1-00:00:00|COMPLETED|x|billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=64G,node=1
101.batch|batch||||||01:00:00||COMPLETED||cpu=8
102_3|serve|bob|live|2026-01-05T09:59:00|2026-01-05T10:00:00|2026-01-05T10:00:30|00:00:30|UNLIMITED|CANCELLED by 1000||billing=1,cpu=1,gres/mig:1g.10gb=2,mem=1.50G
103|cpu|ann|cpu|2026-01-05T10:00:00|2026-01-05T10:05:00|2026-01-05T11:05:00|01:00:00|1:00|COMPLETED||billing=8,cpu=8
104|wait|ann|gpu|2026-01-05T10:00:00|Unknown|Unknown|00:00:00|1:00|PENDING|gres/gpu=1|
105|now|ann|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|Unknown|00:10:00|1:00|RUNNING||gres/gpu=1
106|quick|ann|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|2026-01-05T10:00:00|00:00:00|1:00|FAILED||gres/gpu=1
107|old|cy|gpu|2026-01-05T10:00:01|2026-01-05T10:00:01|2026-01-05T10:01:01|00:01:00|Partition_Limit|TIMEOUT||gres/gpu:a100_3g.40gb=1
"""  # noqa: E501


@pytest.mark.parametrize("elapsed", ["INVALID", "Unknown", ""])
def test_sacct_line_without_a_run_time_is_told_as_such(write: Write, elapsed: str) -> None:
    trace = sacct.read(write(SACCT.replace("|01:00:00|1-00:00:00|", f"|{elapsed}|1-00:00:00|")))
    assert [job.name for job in trace.jobs] == ["102_3", "107"]
    assert "1 jobs whose run time is not known are skipped" in trace.notices
    assert "1 jobs that ended within a second are skipped" in trace.notices


def test_sacct_reader_returns_gpus_slices_and_notices_of_skipped_lines(write: Write) -> None:
    trace = sacct.read(write(SACCT), infer=("live",))
    serve, train, old = trace.jobs
    assert (serve.name, serve.arrival, serve.work, serve.kind, serve.user) == ("102_3", 0, 30, "infer", "bob")
    assert (serve.profile, serve.gpus, serve.estimate) == (Profile.parse("1g.10gb"), 2, None)
    assert (train.name, train.arrival, train.work, train.kind) == ("101", 60, 3600, "train")
    assert (train.profile, train.gpus, train.estimate, train.app) == (None, 2, 86400, "")
    assert (old.profile, old.gpus) == (Profile.parse("3g.40gb"), 1)
    assert sorted(trace.notices) == [
        "1 jobs that ended within a second are skipped",
        "1 jobs without a GPU are skipped",
        "1 steps of jobs are skipped",
        "2 jobs that have not run or not ended are skipped",
    ]


def test_export_of_a_slurm_that_does_not_record_gpus_says_so(write: Write) -> None:
    row = (
        "1|n|u|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|2026-01-05T10:01:00|00:01:00|1:00|COMPLETED||cpu=8,mem=3G\n"
    )
    trace = sacct.read(write(SACCT.partition("\n")[0] + "\n" + row))
    assert trace.notices == ("1 jobs without a GPU are skipped", sacct.UNTRACKED)
    assert sacct.UNTRACKED not in sacct.read(write(SACCT + row)).notices


def test_sacct_raw_columns_are_accepted(write: Write) -> None:
    raw = SACCT.replace("JobID|", "JobIDRaw|").replace("|Elapsed|Timelimit|", "|ElapsedRaw|TimelimitRaw|")
    for text, number in (("01:00:00|1-00:00:00", "3600|1440"), ("00:00:30|UNL", "30|UNL"), ("00:00:00|1:00", "0|1")):
        raw = raw.replace(text, number)
    raw = raw.replace("00:01:00|Part", "60|Part").replace("01:00:00|", "3600|").replace("|00:10:00|1:00", "|600|1")
    assert sacct.read(write(raw), infer=("live",)) == sacct.read(write(SACCT), infer=("live",))


def test_inference_partition_without_jobs_is_reported(write: Write) -> None:
    trace = sacct.read(write(SACCT), infer=("live", "lve"))
    assert "no job with a GPU ran in lve, which should do inference" in trace.notices
    with pytest.raises(TraceError, match=":1: lacks the columns Partition;"):
        sacct.read(write(SACCT.replace("|Partition|", "|Part|")), infer=("live",))
    assert len(sacct.read(write(SACCT.replace("|Partition|", "|Part|"))).jobs) == 3


def test_repeated_lines_of_overlapping_exports_count_once(write: Write) -> None:
    single, repeated = sacct.read(write(SACCT)), sacct.read(write(SACCT + SACCT.partition("\n")[2]))
    assert repeated.jobs == single.jobs
    assert "7 repeated lines are skipped" in repeated.notices


def test_headers_of_files_that_were_joined_are_no_jobs(write: Write) -> None:
    """`for month in ...; do sacct -P ...; done >FILE` and `cat *.csv` repeat the header."""
    for text, read in ((SACCT, sacct.read), (PHILLY, joblog.read), (JOBTABLE, jobtable.read)):
        header, _, rest = text.partition("\n")
        first, _, later = rest.partition("\n")
        assert read(write(f"{header}\n{first}\n{header}\n{later}")).notices == read(write(text)).notices
        assert len(read(write(f"{header}\n{first}\n{header}\n{later}")).jobs) == len(read(write(text)).jobs)


def test_sacct_jobs_arrive_when_they_became_eligible(write: Write) -> None:
    """A policy must not start a job before the one that it depends on has ended, or before its begin time."""
    head, *rows = SACCT.splitlines()
    moments = dict.fromkeys(range(8), "2026-01-05T10:00:00") | {0: "2026-01-05T10:04:00", 2: "Unknown"}
    text = "\n".join([f"{head}|Eligible", *(f"{row}|{moments[number]}" for number, row in enumerate(rows))])
    trace = sacct.read(write(text))
    assert [(job.name, job.arrival) for job in trace.jobs] == [("102_3", 0), ("107", 61), ("101", 300)]
    assert [job.work for job in trace.jobs] == [30, 60, 3600]
    notice = "1 jobs arrive when they became eligible: they were held, had dependencies or a begin time"
    assert notice in trace.notices
    jobs = [json_job(), json_job(job_id=13, time={"eligible": 1772352090}), json_job(job_id=14, time={"eligible": 0})]
    trace = sacct.read(write(json.dumps({"jobs": jobs})))
    assert [(job.name, job.arrival) for job in trace.jobs] == [("12", 0), ("14", 0), ("13", 90)]
    assert trace.notices == (notice,)


def test_bare_number_as_elapsed_is_wrong_because_it_may_be_seconds(write: Write) -> None:
    text = SACCT.replace("|01:00:00|1-00", "|3600|1-00")
    trace = sacct.read(write(text))
    assert [job.name for job in trace.jobs] == ["102_3", "107"]
    assert trace.notices[-1].startswith(
        WRONG.format(1, "line 2: Elapsed must be a duration such as 1-02:03:04; name a column of numbers ElapsedRaw")
    )


@pytest.mark.parametrize(
    "moment", ["05.01.2026 10:00:00", "Mon Jan  5 10:00:00 2026", "Jan 05 10:00", "01/05/26 10:00"]
)
def test_times_in_another_format_are_refused_with_the_one_to_export(write: Write, moment: str) -> None:
    with pytest.raises(
        TraceError, match=f"Submit must be .*, not '{moment}': export it with SLURM_TIME_FORMAT=standard"
    ):
        sacct.read(write(SACCT.replace("2026-01-05T10:00:00", moment).replace("2026-01-05T09:59:00", moment)))


def test_file_of_another_format_is_refused_with_the_sacct_command(write: Write) -> None:
    with pytest.raises(
        TraceError, match=r":1: lacks the columns JobID or JobIDRaw, .*; write the file with sacct -aPX -o JobID,"
    ):
        sacct.read(write("id job\n1 2\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("9|n|u|gpu|soon|2026-01-05T10:00:00|x|1:00|1:00|FAILED||gres/gpu=1", "Submit must be a time such as"),
        ("9|n|u|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|x|long|1:00|FAILED||gres/gpu=1", "Elapsed must be a dur"),
        (
            "9|n|u|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|x|1:00|1:00|FAILED||gres/gpu=",
            "AllocTRES cannot be parsed",
        ),
        ("9|n|u|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|x|1:00", "has 8 cells, the header has 12"),
    ],
)
def test_wrong_sacct_line_is_skipped_and_told_and_a_file_of_them_is_refused(
    write: Write, line: str, message: str
) -> None:
    (notice,) = skipped(lambda text: sacct.read(write(text)), SACCT, f"{line}\n")
    assert notice.startswith(WRONG.format(1, f"line 10: {message}"))
    with pytest.raises(TraceError, match=f":10: {message}.*; 8 lines or jobs are wrong, 3 can be read"):
        sacct.read(write(SACCT + "".join(f"{line}\n".replace("9|", f"9{number}|", 1) for number in range(8))))


@pytest.mark.parametrize(
    ("gpu_type", "profile"),
    [
        ("a100-1g.10gb", "1g.10gb"),
        ("A100-1G.10GB", "1g.10gb"),
        ("mig-1g.10gb", "1g.10gb"),
        ("nvidia_h100_80gb_hbm3_2g.20gb", "2g.20gb"),
        ("a100.3g.40gb", "3g.40gb"),
        ("1g.10gb.me", "1g.10gb+me"),
        ("a100_1g_10gb", "1g.10gb"),
        ("a100_1g10gb", "1g.10gb"),
        ("1g.10gb_short", "1g.10gb"),
        ("a100", None),
        ("h100_80gb", None),
        ("gh200_144g", None),
    ],
)
def test_profile_is_recognised_in_the_gres_type_names_of_sites(
    write: Write, gpu_type: str, profile: str | None
) -> None:
    line = f"9|n|u|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|x|1:00|1:00|FAILED||gres/gpu=3,gres/gpu:{gpu_type}=3"
    (job,) = sacct.read(write(SACCT.splitlines()[0] + "\n" + line + "\n")).jobs
    assert (job.profile, job.gpus) == (Profile.parse(profile) if profile else None, 3)


@pytest.mark.parametrize(
    ("gpu", "gpu_type", "profile"),
    [
        ("a100-80gb", "nvidia_a100_80gb_pcie_3g.39gb", "3g.40gb"),
        ("a100-80gb", "7g.79gb", "7g.80gb"),
        ("a100-80gb", "1g.20gb", "1g.20gb"),
        ("a100-80gb", "1g.9gb", "1g.10gb"),
        ("h200", "nvidia_h200_1g.16gb", "1g.18gb"),
        ("h200", "3g.70gb", "3g.71gb"),
        ("h200", "1g.33gb", "1g.35gb"),
        ("a100-80gb", "1g.5gb", "1g.5gb"),
        ("a100-80gb", "3g.20gb", "3g.20gb"),
        ("a100-80gb", "1g.10gb.me", "1g.10gb+me"),
        ("h200", "1g.16gb.me", "1g.18gb+me"),
    ],
)
def test_slices_get_the_profiles_of_the_gpu_whatever_autodetect_calls_them(
    write: Write, gpu: str, gpu_type: str, profile: str
) -> None:
    line = f"9|n|u|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|x|1:00|1:00|FAILED||gres/gpu:{gpu_type}=2"
    path = write(SACCT.splitlines()[0] + "\n" + line + "\n")
    (job,) = sacct.read(path, geometry=geometry(gpu)).jobs
    assert (job.profile, job.gpus) == (Profile.parse(profile), 2)
    names = {1001: "gres/gpu", 1002: f"gres/gpu:{gpu_type}"}
    first = jobtable.read(write(JOBTABLE), names, geometry=geometry(gpu)).jobs[1]
    assert first.profile == Profile.parse(profile)


def sacct_of(write: Write, *tres: str, gpu: str = "a100-80gb") -> Trace:
    """A trace of jobs of ten seconds that held these TRES."""
    times = "2026-01-05T10:00:00|2026-01-05T10:00:00|2026-01-05T10:00:10"
    rows = [f"{number}|n|u|gpu|{times}|00:00:10|1:00|COMPLETED||{held}" for number, held in enumerate(tres)]
    return sacct.read(write("\n".join([SACCT.splitlines()[0], *rows, ""])), geometry=geometry(gpu) if gpu else None)


@pytest.mark.parametrize(
    "tres", ["gres/gpu:1g=2", "gres/gpu:mig_1g=2,gres/gpu=2", "gres/gpu:a100_1G=2", "gres/mig-1g=2"]
)
def test_slices_named_without_memory_get_the_profile_of_the_gpu_with_a_notice(write: Write, tres: str) -> None:
    for gpu, profile in (("a100-80gb", "1g.10gb"), ("h200", "1g.18gb")):
        trace = sacct_of(write, tres, gpu=gpu)
        assert [(job.profile, job.gpus) for job in trace.jobs] == [(Profile.parse(profile), 2)]
        assert trace.notices == (f"1 jobs on slices 1g, whose memory is not named, are replayed on {profile}",)
    unknown = sacct_of(write, tres, "gres/gpu=1", gpu="")
    assert [(job.profile, job.gpus) for job in unknown.jobs] == [(None, 2), (None, 1)]
    assert unknown.notices == ("1 jobs on slices of unknown size are replayed on whole GPUs",)


def test_job_with_slices_and_whole_gpus_is_replayed_on_whole_gpus_with_a_notice(write: Write) -> None:
    trace = sacct_of(
        write,
        "gres/gpu:a100_3g.20gb=2,gres/gpu:a100=1,gres/gpu=3",
        "gres/gpu:a100_3g.20gb=2,gres/gpu:a100=1",
        "gres/gpu:a100_3g.20gb=2,gres/gpu=3",
        "gres/mig:3g.40gb=2,gres/mig=2,gres/gpu=1",
        "gres/gpu:a100_1g.10gb=1,gres/gpu:a100_3g.40gb=1,gres/gpu=2",
        "gres/gpu:a100=4,gres/gpu:v100=2,gres/gpu=6",
    )
    assert [(job.profile, job.gpus) for job in trace.jobs] == [
        *[(None, 3)] * 4, (Profile.parse("3g.40gb"), 2), (None, 6),
    ]  # fmt: skip
    assert trace.notices == ("4 jobs on slices and whole GPUs at once are replayed on whole GPUs",)


def test_shares_and_slices_of_unknown_size_are_skipped_with_their_own_reasons(write: Write) -> None:
    trace = sacct_of(
        write,
        "gres/mig-1g.10gb=2",
        "gres/shard=4",
        "gres/gpu=0,gres/mps=50",
        "gres/mig=1",
        "gres/gpu:5g=1",
        "gres/gpu:a10g=1",
        "gres/nic=1",
    )
    assert [(job.profile, job.gpus) for job in trace.jobs] == [(Profile.parse("1g.10gb"), 2), (None, 1)]
    assert trace.notices == (
        "2 jobs with shares of a GPU (gres/shard, gres/mps) are skipped",
        "2 jobs on slices of unknown size are skipped",
        "1 jobs without a GPU are skipped",
    )
    both = sacct_of(write, "gres/gpu=1,gres/mps=50")
    assert both.notices == ("1 jobs with shares of a GPU (gres/shard, gres/mps) are replayed on whole GPUs",)
    table = jobtable.read(write(JOBTABLE), {1001: "gres/shard", 1002: "gres/gpu:1g"}, (), A100)
    assert [(job.profile, job.gpus) for job in table.jobs] == [
        (Profile.parse("1g.10gb"), 2),
        (Profile.parse("1g.10gb"), 4),
    ]
    assert table.notices == (
        "1 jobs with shares of a GPU (gres/shard, gres/mps) are skipped",
        "2 jobs that have not run or not ended are skipped",
        "1 jobs without a GPU are skipped",
        "2 jobs on slices 1g, whose memory is not named, are replayed on 1g.10gb",
    )


def test_sacct_reader_refuses_ambiguous_times(write: Write) -> None:
    """Slurm's own grammar reads a zone as a date, and a missing year as the current one."""
    head, line = SACCT.splitlines()[0], "|n|u|gpu|{0}|{0}|x|1:00|1:00|FAILED||gres/gpu=1"

    def arrivals(*times: str) -> list[float]:
        text = "\n".join([head, *(f"{number}{line.format(time)}" for number, time in enumerate(times))])
        return [job.arrival for job in sacct.read(write(text + "\n")).jobs]

    assert arrivals("2026-01-05T10:00:00", "2026-01-05 10:01:00") == [0, 60]
    assert arrivals("2026-01-05T10:00:00-0330", "2026-01-05T13:31:00Z", "2026-01-05T15:32:00+02:00") == [0, 60, 120]
    assert arrivals("1767607200", "1767607260") == [0, 60]
    for wrong in ("10:00:00", "01/05-10:00:00", "yesterday", "2026-01-05T10:00:00+5", "2026-13-05T10:00:00"):
        with pytest.raises(TraceError, match=":2: Submit must be a time such as 2026-01-31T12:00:00, not"):
            arrivals(wrong)


def test_job_without_an_end_time_counts_as_not_ended_in_any_state(write: Write) -> None:
    unknown = SACCT.replace("2026-01-05T11:05:00|01:00:00|1-00:00:00|COMPLETED", "Unknown|01:00:00|1:00|STAGE_OUT")
    trace = sacct.read(write(unknown))
    assert [job.name for job in trace.jobs] == ["102_3", "107"]
    assert "3 jobs that have not run or not ended are skipped" in trace.notices


SKIPPED = "{} lines with a delimiter or a newline in a text of their user are skipped"


@pytest.mark.parametrize("name", ["lr=0.1|wd=0.2", "|", "a|||", "a\nb", "a\n\nb", "a\nb|c\nd", "a\n|"])
def test_job_name_with_a_delimiter_or_newline_is_read(write: Write, name: str) -> None:
    first, _, _ = sacct.read(write(SACCT.replace("|serve|", f"|{name}|"))).jobs
    assert sacct.read(write(SACCT.replace("|serve|", f"|{name}|"))) == sacct.read(write(SACCT))
    assert (first.name, first.user, first.gpus) == ("102_3", "bob", 2)


def test_line_whose_texts_cannot_be_told_apart_is_skipped_and_counted(write: Write) -> None:
    head, *rows = SACCT.splitlines()
    commented = [f"{head}|Comment", *(f"{row}|c" for row in rows)]
    text = "\n".join(commented).replace("|train|", "|tr|ain|") + "\n"
    trace = sacct.read(write(text))
    assert [job.name for job in trace.jobs] == ["102_3", "107"]
    assert SKIPPED.format(1) in trace.notices
    broken = sacct.read(write(SACCT.replace("101|train|", "100|be\n101|train|")))
    assert broken.jobs == sacct.read(write(SACCT)).jobs
    assert SKIPPED.format(1) in broken.notices
    cut = sacct.read(write(SACCT + "108|cut"))
    assert SKIPPED.format(1) in cut.notices


def test_line_with_an_extra_cell_and_no_text_of_users_is_wrong(write: Write) -> None:
    text = SACCT.replace("|JobName|", "|Account|")
    first = next(row for row in text.splitlines() if "|train|" in row)
    (notice,) = skipped(lambda text: sacct.read(write(text)), text, first.replace("|train|", "|tr|ain|") + "\n")
    assert notice == WRONG.format(1, "line 10: has 13 cells, the header has 12")


def test_sacct_columns_may_follow_an_index_without_a_name(write: Write) -> None:
    """pandas writes one."""
    row = "0,7,n,ann,gpu,2026-01-05T10:00:00,2026-01-05T10:00:00,2026-01-05T10:01:00,00:01:00,60,COMPLETED,,gres/gpu=1"
    (job,) = sacct.read(write(f",{SACCT.partition(chr(10))[0].replace('|', ',')}\n{row}\n")).jobs
    assert (job.name, job.work) == ("7", 60.0)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "^", "~"])
def test_sacct_with_another_delimiter_is_read(write: Write, delimiter: str) -> None:
    text = "".join(f"{row}\n" for row in SACCT.splitlines()).replace("|", delimiter)
    assert sacct.read(write(text), infer=("live",)) == sacct.read(write(SACCT), infer=("live",))
    names = text.replace("serve", f"a{delimiter}b")
    assert sacct.read(write(names), infer=("live",)) == sacct.read(write(SACCT), infer=("live",))


def test_commas_in_lists_of_tres_do_not_divide_them(write: Write) -> None:
    head = "JobID,User,Submit,Start,Elapsed,State,ReqTRES,AllocTRES,Partition\n"
    moment = "2026-01-05T10:00:00"
    row = f"1,ann,{moment},{moment},00:01:00,COMPLETED,cpu=1,gres/gpu=1,node=1,cpu=1,gres/gpu:a100=2,gres/gpu=2,gpu\n"
    none = f"2,ann,{moment},{moment},00:01:00,COMPLETED,,billing=4,cpu=1,gres/gpu=3,mem=1G,gpu\n"
    quoted = f'"3","ann",{moment},{moment},00:01:00,COMPLETED,"","cpu=1,gres/gpu=4",gpu\n'
    split = f"4,ann,{moment},{moment},00:01:00,COMPLETED,,cpu=1;gres/gpu:a100=2;gres/gpu=2,gpu\n"
    assert [job.gpus for job in sacct.read(write(head + row + none + quoted + split)).jobs] == [2, 3, 4, 2]


COMPLETED = """JobId=19 UserId=ann(1001) GroupId=ann(1001) Name=wrap JobState=CANCELLED Partition=gpu \
TimeLimit=UNLIMITED StartTime=2026-12-01T00:17:45 EndTime=2026-12-01T00:17:45 NodeList=(null) NodeCnt=0 \
ProcCnt=0 WorkDir=/tmp ReservationName= Tres=cpu=1,mem=500M,node=1,billing=1,gres/gpu=1 Account=a QOS=normal WcKey= \
Cluster=c SubmitTime=2026-12-01T00:17:45 EligibleTime=unknown DerivedExitCode=0:0 ExitCode=0:0 \n"""


def completed(name: str = "wrap", **changed: str) -> str:
    """Return a line as slurmctld writes it with jobcomp/filetxt."""
    line = COMPLETED.replace("Name=wrap", f"Name={name}", 1)
    fields = {"JobState": "COMPLETED", "NodeList": "n1", "EndTime": "2026-12-01T00:18:45", "TimeLimit": "5", **changed}
    for field, value in {"EligibleTime": "2026-12-01T00:17:45", **fields}.items():
        line = re.sub(rf" {field}=\S*(?! {field})", f" {field}={value}", line)
    return line.replace("JobId=19", f"JobId={changed.get('JobId', '19')}", 1)


def test_log_of_job_completions_is_read(write: Write) -> None:
    het = "2026-12-01T00:17:45 HetJobId=14 HetJobOffset=1"
    rows = [
        COMPLETED,
        completed(JobId="20", EligibleTime="2026-12-01T00:17:46 ArrayJobId=13 ArrayTaskId=2", TimeLimit="UNLIMITED"),
        completed(JobId="15", EligibleTime=het, Tres="cpu=1,gres/mig=1,gres/mig:2g.20gb=1"),
        completed(JobId="17", JobState="PENDING", TimeLimit="1440"),
        completed(
            "x JobState=FAILED y", JobId="16", Tres="cpu=1,gres/gpu:a100=2,gres/gpu=2", WorkDir="/a Tres=gres/gpu=9"
        ),
        completed(JobId="18", Tres="cpu=1"),
        "   cut off\n",
    ]
    trace = sacct.read(write("".join(rows), "jobcomp.log"), geometry=A100)
    assert [(job.name, job.arrival, job.work, job.gpus, job.estimate) for job in trace.jobs] == [
        ("14+1", 0, 60, 1, 300), ("17", 0, 60, 1, 86400), ("16", 0, 60, 2, 300), ("13_2", 1, 60, 1, None),
    ]  # fmt: skip
    assert (trace.jobs[0].profile, trace.jobs[0].user) == (Profile.parse("2g.20gb"), "ann")
    assert trace.notices[:2] == (
        "1 jobs that have not run or not ended are skipped",
        "1 jobs without a GPU are skipped",
    )
    assert trace.notices[2].startswith(WRONG.format(1, "line 7: is not a line of jobcomp/filetxt, which begins with"))
    scontrol = "JobId=12 JobName=wrap\n   UserId=ann(1001) GroupId=ann(1001)\n   JobState=COMPLETED Reason=None\n"
    with pytest.raises(TraceError, match=r":1: is not a line of jobcomp/filetxt, .*; write the file with sacct -aPX"):
        sacct.read(write(scontrol))


def json_job(**changed: Any) -> dict[str, Any]:
    """Return a job as `sacct --json` of Slurm 23.11 prints it, shortened."""
    job = {
        "job_id": 12,
        "user": "ann",
        "partition": "live",
        "array": {"job_id": 0, "task_id": {"set": False, "infinite": False, "number": 0}},
        "time": {
            "submission": 1772352000,
            "start": 1772352005,
            "end": 1772355605,
            "elapsed": 3600,
            "limit": {"set": True, "infinite": False, "number": 90},
        },
        "state": {"current": ["COMPLETED"], "reason": "None"},
        "tres": {
            "allocated": [
                {"type": "cpu", "name": "", "id": 1, "count": 8},
                {"type": "gres", "name": "gpu", "id": 1001, "count": 2},
                {"type": "gres", "name": "gpu:a100_3g.39gb", "id": 1002, "count": 2},
            ],
            "requested": [],
        },
        "steps": [{}],
    }
    times = changed.pop("time", {})
    return {**job, **changed, "time": {**job["time"], **times}}  # type: ignore[dict-item]


def test_sacct_json_is_read(write: Write) -> None:
    infinite = {"set": True, "infinite": True, "number": 0}
    task = {"job_id": 20, "task_id": {"set": True, "infinite": False, "number": 3}}
    jobs = [
        json_job(),
        json_job(job_id=13, array=task, time={"limit": infinite, "submission": 1772352060}),
        json_job(job_id=14, time={"start": {"set": False, "infinite": False, "number": 0}, "end": 0}),
        json_job(job_id=15, state={"current": "RUNNING", "reason": "None"}, time={"end": 0}),
        json_job(job_id=16, tres={"allocated": [{"type": "cpu", "name": "", "id": 1, "count": 8}]}),
        json_job(job_id=17, time={"limit": 60, "submission": 1772352120}, state={"current": "FAILED"}),
    ]
    trace = sacct.read(write(json.dumps({"meta": {}, "jobs": jobs}, indent=1), "sacct.json"), ("live",), A100)
    first, second, third = trace.jobs
    assert (first.name, first.user, first.kind, first.work, first.estimate) == ("12", "ann", "infer", 3600, 5400)
    assert (first.gpus, first.profile, first.arrival) == (2, Profile.parse("3g.40gb"), 0)
    assert (second.name, second.estimate, second.arrival) == ("20_3", None, 60)
    assert (third.name, third.estimate) == ("17", 3600)
    assert trace.notices == (
        "2 jobs that have not run or not ended are skipped",
        "1 jobs without a GPU are skipped",
    )


@pytest.mark.parametrize("flag", ["REQUEUED", "RESIZING"])
def test_run_that_ended_in_a_requeue_is_a_job_in_sacct_json_too(write: Write, flag: str) -> None:
    # Slurm 23.11 to 26.05 print the state of the queue before the flag, `sacct -P` the flag alone
    requeued = json_job(state={"current": ["PENDING", flag], "reason": "None"}, time={"elapsed": 30})
    waiting = json_job(state={"current": ["PENDING"], "reason": "None"}, time={"start": 0, "end": 0, "elapsed": 0})
    trace = sacct.read(write(json.dumps({"jobs": [requeued, waiting, json_job(job_id=13)]}), "sacct.json"))
    assert [(job.name, job.work) for job in trace.jobs] == [("12", 30), ("13", 3600)]
    assert trace.notices == ("1 jobs that have not run or not ended are skipped",)


def test_run_of_less_than_a_second_is_told_as_such_in_sacct_json(write: Write) -> None:
    jobs = [json_job(), json_job(job_id=13, time={"end": 1772352005, "elapsed": 0})]
    trace = sacct.read(write(json.dumps({"jobs": jobs}), "sacct.json"))
    assert trace.notices == ("1 jobs that ended within a second are skipped",)


def test_components_of_heterogeneous_jobs_are_jobs_with_a_notice(write: Write) -> None:
    notice = "2 jobs are components of heterogeneous jobs: each is simulated as a job of its own"
    row = SACCT.splitlines()[1]
    lines = [SACCT.splitlines()[0], row, *(row.replace("101|", f"500+{number}|") for number in (0, 1))]
    trace = sacct.read(write("\n".join(lines)))
    assert [job.name for job in trace.jobs] == ["101", "500+0", "500+1"]
    assert trace.notices == (notice,)
    unset = {"job_id": 0, "job_offset": {"set": False, "infinite": False, "number": 0}}
    new = {"job_id": 500, "job_offset": {"set": True, "infinite": False, "number": 0}}
    jobs = [json_job(het=unset), json_job(het=new), json_job(job_id=13, het={"job_id": 500, "job_offset": 1})]
    trace = sacct.read(write(json.dumps({"jobs": jobs})))
    assert [job.name for job in trace.jobs] == ["12", "500+0", "500+1"]
    assert trace.notices == (notice,)
    head, *rows = JOBTABLE.splitlines()
    values = ("0", "11", "0", "0", "0", "15")
    table = [f"{head},het_job_id", *(f"{line},{value}" for line, value in zip(rows, values, strict=True))]
    assert notice in jobtable.read(write("\n".join(table))).notices


def test_steps_of_sacct_json_are_not_kept(write: Write) -> None:
    """They are most of a file, which has some kilobytes for each job."""
    step = {"step": {"id": "12.0"}, "tres": {"consumed": [{"type": "cpu", "count": 1}]}}
    path = write(json.dumps({"jobs": [json_job(job_id=number, steps=[step] * 40) for number in range(200)]}))
    tracemalloc.start()
    try:
        assert len(sacct.read(path).jobs) == 200
        assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_sacct_json_may_have_bytes_that_are_not_utf_8(write: Write) -> None:
    path = write(json.dumps({"jobs": [json_job(name="caf#"), json_job(job_id=13)]}))
    whole = sacct.read(path)
    path.write_bytes(path.read_bytes().replace(b"caf#", b"caf\xe9"))
    assert sacct.read(path) == whole
    (job,) = sacct.read(write(json.dumps({"jobs": [json_job(user="\ud800")]}))).jobs
    assert job.user == "\ud800"


def test_cells_of_sacct_lines_are_not_kept(write: Write) -> None:
    rows = (
        f"{n}|{'u' * 2000}|2026-01-05T10:00:{n % 60:02d}|2026-01-05T11:00:00|1:00|FAILED|gres/gpu=1\n"
        for n in range(500)
    )
    path = write("JobID|User|Submit|Start|Elapsed|State|AllocTRES\n" + "".join(rows))
    sacct.read(path)  # what is imported and cached once does not count
    tracemalloc.start()
    try:
        assert len(sacct.read(path).jobs) == 500
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is JSON, but not of sacct --json, which has a list of jobs; write the file with sacct -aPX -o JobID,"),
        ('{"jobs": 3}', "is JSON, but not of sacct --json"),
        ('{"jobs": [', "is not complete JSON (Expecting value"),
        ('{"jobs": [{}]}', "job 0 of the list: lacks 'time'; write the file with sacct"),
        ('{"jobs": [7]}', "job 0 of the list: is not a job as sacct --json prints it"),
        (json.dumps({"jobs": [json_job(time={"elapsed": "x"})]}), "job 0 of the list: is not a job as sacct"),
        (json.dumps({"jobs": [json_job(time={"submission": 7})]}), "job 0 of the list: Submit must be a time such as"),
    ],
)
def test_invalid_sacct_json_raises_an_error_with_the_reason(write: Write, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        sacct.read(write(text))


SWF = "; Version: 2.2\n; Computer: ANL\n"
SWF_JOB = "1 0 5 3600 128 -1 -1 128 7200 -1 1 5 1 -1 1 1 -1 -1\n"


@pytest.mark.parametrize("text", [SWF + SWF_JOB, SWF_JOB])
def test_standard_workload_format_is_refused_because_it_has_no_gpus(write: Write, text: str) -> None:
    for read in (sacct.read, joblog.read, jobtable.read):
        with pytest.raises(
            TraceError, match=r"trace\.csv: is in the Standard Workload Format \(SWF\), which has no GPUs"
        ):
            read(write(text))


def test_json_for_a_table_is_refused_with_the_kinds_that_are_json(write: Write) -> None:
    for read in (joblog.read, jobtable.read, philly.read):
        with pytest.raises(TraceError, match=r'is JSON, not a table; .* sacct --json \(trace = "sacct"\)'):
            read(write('{"jobs": []}'))


def test_table_of_another_kind_is_refused_with_the_kind_that_reads_it(write: Write) -> None:
    tables = {"sacct": SACCT, "jobtable": JOBTABLE, "openb": OPENB, "joblog": HELIOS_LOG}
    readers: dict[str, Callable[[Path], Trace]] = {
        "sacct": sacct.read, "jobtable": jobtable.read, "joblog": joblog.read, "mixed": mixed.read, "muri": muri.read,
    }  # fmt: skip
    for kind, table in tables.items():
        for other, read in readers.items():
            if other not in (kind, "joblog" if kind == "openb" else ""):  # openb's names are read in a job log too
                with pytest.raises(TraceError, match=f':1: lacks the columns .*; trace = "{kind}" reads such a table'):
                    read(write(table))
    with pytest.raises(TraceError, match=r":1: lacks the columns User; found .*; write the file with sacct"):
        sacct.read(write(SACCT.replace("User", "Owner", 1)))


def test_blank_lines_are_ignored_except_as_the_first_line(write: Write) -> None:
    assert joblog.read(write(PHILLY + "  \n\n \t \n")) == joblog.read(write(PHILLY))
    with pytest.raises(TraceError, match=":1: is blank; the first line must name submit_time or timestamp, duration"):
        joblog.read(write("\n" + PHILLY))


@pytest.mark.parametrize("byte", [n for n in range(1, 256) if chr(n) not in "|\n\r"])
def test_sacct_reader_accepts_any_byte_in_a_job_name(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "sacct"
    for name in (b"%ctrain", b"tr%cain", b"train%c"):
        path.write_bytes(SACCT.encode().replace(b"|train|", b"|" + name % byte + b"|"))
        assert [job.name for job in sacct.read(path).jobs] == ["102_3", "101", "107"]


def test_a_trace_can_be_cut_sped_up_and_repeated() -> None:
    trace = Trace(tuple(SimulatedJob(n, f"j{n}", n * 10.0, 5.0, user="u") for n in range(4)))
    cut = trace.window(10, 30)
    assert [job.arrival for job in cut.jobs] == [0, 10]
    assert [job.arrival for job in trace.faster(2).jobs] == [0, 5, 10, 15]
    assert len(trace.first(3).jobs) == 3
    copies = trace.copies(3, jitter=100, seed=1)
    assert [job.id for job in copies.jobs] == list(range(12))
    assert sorted(job.arrival for job in copies.jobs) == [job.arrival for job in copies.jobs]
    assert copies == trace.copies(3, jitter=100, seed=1)
    assert copies != trace.copies(3, jitter=100, seed=2)


JOBTABLE = """\
job_db_inx,id_job,id_user,partition,state,timelimit,time_submit,time_start,time_end,time_suspended,tres_alloc,job_name
1,10,501,train,3,60,1000,1100,1400,0,"1=4,2=8000,4=1,1002=2",a
2,11,502,live,5,4294967295,900,1000,1200,50,"1=4,1001=1",b
3,12,502,live,1,60,1300,1300,0,0,"1=4,1001=1",c
4,13,503,cpu,3,60,1300,1310,1400,0,"1=4,1001=0",d
5,14,503,train,4,60,1300,0,1400,0,,e
6,15,503,train,16390,60,1500,1500,1600,0,"1=1,1001=4,1002=4",f
"""


def test_job_table_gpus_are_identified_by_tres_number_or_name(write: Write) -> None:
    first, second, third = jobtable.read(write(JOBTABLE), infer=("live",)).jobs
    assert (first.name, first.user, first.kind, first.arrival, first.work) == ("11", "502", "infer", 0, 150)
    assert (first.gpus, first.estimate, first.app) == (1, None, "")
    assert (second.name, second.kind, second.arrival, second.work) == ("10", "train", 100, 300)
    assert (second.gpus, second.estimate, third.gpus) == (2, 3600, 4)
    assert jobtable.read(write(JOBTABLE)).notices == (
        "2 jobs that have not run or not ended are skipped",
        "1 jobs without a GPU are skipped",
        "TRES 1001, 1002 are taken for GPUs, as they have no names",
    )
    names = {1001: "gres/gpu", 1002: "gres/mig:1g.10gb"}
    first, second, third = jobtable.read(write(JOBTABLE), names).jobs
    assert (first.profile, first.gpus) == (None, 1)
    assert (second.profile, second.gpus) == (Profile.parse("1g.10gb"), 2)
    assert (third.profile, third.gpus) == (None, 8)
    (volta,) = jobtable.read(write(JOBTABLE), {1001: "gres/gpu:tesla"}).jobs[:1]
    assert volta.name == "11"


def test_runs_that_ended_in_a_requeue_or_a_change_of_size_are_jobs(write: Write) -> None:
    """slurmdbd gives them these states, with the time of their end."""
    ended = "101|n|u|gpu|2026-01-05T10:00:00|2026-01-05T10:00:00|2026-01-05T10:01:00|00:01:00|1:00|{}||gres/gpu=1\n"
    lines = map(ended.format, ("REQUEUED", "RESIZING", "COMPLETED"))
    assert [job.work for job in sacct.read(write(SACCT.partition("\n")[0] + "\n" + "".join(lines))).jobs] == [60] * 3
    rows = [f'1,10,501,train,{state},60,1000,1100,1400,0,"1=4,1001=2",a\n' for state in (0x400, 0x2000, 0x4000, 3)]
    assert len(jobtable.read(write(JOBTABLE.partition("\n")[0] + "\n" + "".join(rows))).jobs) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "1=4,",
            "cpu=4,",
            ":2: tres_alloc must have entries such as 1001=2, not 'cpu=4'; 4 lines or jobs are wrong, 0 can be read",
        ),
        ("tres_alloc", "tres", ":1: lacks the columns tres_alloc or tres_req"),
    ],
)
def test_invalid_job_table_raises_an_error_with_the_reason(write: Write, old: str, new: str, message: str) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        jobtable.read(write(JOBTABLE.replace(old, new)))


def test_wrong_line_of_a_job_table_is_skipped_and_told(write: Write) -> None:
    row = '7,16,503,train,3,60,1500,x,1600,0,"1=1,1001=4",g\n'
    (notice,) = skipped(lambda text: jobtable.read(write(text)), JOBTABLE, row)
    assert notice == WRONG.format(1, "line 8: time_start must be a number, not 'x'")


def test_jobs_of_a_job_table_arrive_when_they_became_eligible(write: Write) -> None:
    head, *rows = JOBTABLE.splitlines()
    moments = (1050, 0, 1300, 1300, 1300, 4294967294)
    text = "\n".join([f"{head},time_eligible", *(f"{row},{at}" for row, at in zip(rows, moments, strict=True))])
    trace = jobtable.read(write(text))
    assert [(job.name, job.arrival) for job in trace.jobs] == [("11", 0), ("10", 150), ("15", 600)]
    assert "1 jobs arrive when they became eligible: they were held, had dependencies or a begin time" in trace.notices


def test_runs_of_overlapping_dumps_of_a_job_table_count_once(write: Write) -> None:
    once, twice = jobtable.read(write(JOBTABLE)), jobtable.read(write(JOBTABLE + JOBTABLE))
    assert twice.jobs == once.jobs
    assert any(notice.endswith("jobs that repeat an earlier line are skipped") for notice in twice.notices)


def test_job_table_and_log_may_be_separated_by_tabs(write: Write) -> None:
    """`mysql -B` quotes nothing, so a quotation mark in a job's name means nothing either."""
    tabs = write("\n".join("\t".join(cells) for cells in csv.reader(JOBTABLE.splitlines())) + '"\n', "table.tsv")
    assert jobtable.read(tabs).jobs == jobtable.read(write(JOBTABLE)).jobs
    assert joblog.read(write(PHILLY.replace(",", "\t"), "log.tsv")) == joblog.read(write(PHILLY))


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("|", r"\|")])
def test_other_separator_is_named_in_the_error(write: Write, separator: str, name: str) -> None:
    for text, read in ((PHILLY, joblog.read), (JOBTABLE.replace('"', ""), jobtable.read)):
        with pytest.raises(TraceError, match=f":1: separates its columns by {name}: write .* with commas or tabs"):
            read(write(text.replace(",", separator)))
