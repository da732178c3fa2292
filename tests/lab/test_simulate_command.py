"""`migbatch simulate`, its scenarios, and the benchmarks that go with it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.main import cli
from slurm_migbatch.config.reader import ConfigError
from slurm_migbatch.lab.bars import exponent
from slurm_migbatch.lab.bench import scale, simulator
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.cli.simulate import simulate
from slurm_migbatch.lab.sim import scenario
from slurm_migbatch.lab.sim.play import UNIX_TIMES, ScenarioData, play

PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n" + "".join(
    f"2017-10-09 06:{n:02d}:00,{300 + 40 * n},{1 + n % 3},1,vc{n % 2}\n" for n in range(20)
)
TABLE = """gpu,model,kind,profile,batch,throughput_per_s
a100-40gb,net,train,7g.40gb,8,100
a100-40gb,net,train,3g.20gb,8,60
a100-40gb,big,train,7g.40gb,8,50
"""
BASE = """
[cluster]
nodes = 2
gpus = 2
[workload]
trace = "philly"
path = "philly.csv"
[policy]
name = "easy"
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "philly.csv").write_text(PHILLY)
    (tmp_path / "table.csv").write_text(TABLE)

    def make(text: str = BASE) -> Path:
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return path

    return make


def test_scenario_is_simulated_and_summarised(write: Callable[..., Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(
        simulate, [str(write()), "--html", str(tmp_path / "r.html"), "--log", str(tmp_path / "r.jsonl")]
    )
    assert done.exit_code == 0, done.output
    assert "on philly" in done.output and "easy" in done.output
    assert "mean JCT" in done.output
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 3
    assert "trace = &#34;philly&#34;" in page
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert sum(row["what"] == "complete" for row in rows) == 20


def test_json_has_the_figures_of_every_seed_and_their_means(write: Callable[..., Path]) -> None:
    text = BASE.replace('"philly.csv"', '"philly.csv"\nmodels = "draw"\ncopies = 2') + (
        '[run]\nseeds = 3\n[speeds]\nkind = "table"\npath = "table.csv"\n'
    )
    done = CliRunner().invoke(simulate, [str(write(text)), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["seeds"] == [0, 1, 2]
    (easy,) = found["policies"]
    means = [figures["all"]["jct_s"]["mean"] for figures in easy["each"]]
    assert len(set(means)) == 3
    assert easy["figures"]["all"]["jct_s"]["mean"]["mean"] == pytest.approx(sum(means) / 3)
    assert easy["figures"]["all"]["jobs"]["mean"] == 40
    again = json.loads(CliRunner().invoke(simulate, [str(write(text)), "--json"]).output)
    assert again == found


def test_limits_load_and_window_are_applied(write: Callable[..., Path]) -> None:
    text = BASE.replace(
        '"philly.csv"', '"philly.csv"\nbegin_s = 120\nend_s = 600\nlimit = 5\nload = 2.0\nstart_slo_s = 1.0'
    )
    loaded = scenario.load(write(text))
    jobs = ScenarioData(loaded).jobs(0)
    assert [job.arrival for job in jobs] == [0, 30, 60, 90, 120]
    assert all(job.start_slo_s is None for job in jobs)  # a start objective does not apply to training
    assert all(run.ended is not None for run in play(loaded, ScenarioData(loaded), 0).runs)


def test_what_arrives_is_told_before_the_results(write: Callable[..., Path], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("job_id,submit_time,duration,gpu_num\na,0,300,2\nb,100,60,0.5\nc,1000,400,1\n")
    path = write(BASE.replace("philly", "joblog", 1).replace("philly.csv", "log.csv"))
    done = CliRunner().invoke(simulate, [str(path)])
    assert done.output.splitlines()[0] == (
        "3 jobs arrive within 16.7 min, half of them are shorter than 5.0 min; on average they need 1.03 of 4 GPUs in "
        "this time; 3 have no time limit: their lengths stand for it, so backfill knows these"
    )
    found = json.loads(CliRunner().invoke(simulate, [str(path), "--json"]).output)["workload"]
    needed = (2 * 300 + 60 * 4 / 7 + 400) / 1000
    assert found == {"jobs": 3, "span_s": 1000, "work_s": 300, "gpus": pytest.approx(needed), "without_limit": 3}
    log.write_text("job_id,submit_time,duration,gpu_num\na,0,300,2\nb,0,100,1\n")
    alone = CliRunner().invoke(simulate, [str(path)]).output.splitlines()[0]
    assert alone.startswith("2 jobs arrive within 0 s, half of them are shorter than 3.3 min; 2 have no time limit")
    path = write(path.read_text().replace('"log.csv"', '"log.csv"\ncopies = 3'))
    assert CliRunner().invoke(simulate, [str(path)]).output.startswith("2 jobs, each 3 times, arrive within")
    log.write_text("job_id,submit_time,duration,gpu_num\na,0,3000,2\nb,1,100,1\n")
    assert "need 18300 of 4 GPUs" in CliRunner().invoke(simulate, [str(path)]).output


def test_whole_gpus_on_a_static_partition_are_told(write: Callable[..., Path]) -> None:
    output = CliRunner().invoke(simulate, [str(write()), "--policy", "static"]).output
    assert "note: static: 20 jobs request whole GPUs and get slices of its partition" in output
    assert "static:" not in CliRunner().invoke(simulate, [str(write()), "--policy", "fifo"]).output


#: two nodes with a GPU each: c needs both; d is short enough to run beside b's end, e is not
TINY = """job_id,user,gpu_num,state,submit_time,duration
a,u,1,COMPLETED,0,600
b,v,1,COMPLETED,10,300
c,u,2,COMPLETED,20,100
d,v,1,COMPLETED,30,50
e,w,1,COMPLETED,30,400
f,w,1,COMPLETED,2000,100
"""
BY_HAND = {
    "fifo": (600, 310, 700, 750, 1100, 2100),  # c waits for a, d and e wait for c
    "sjf": (600, 310, 860, 360, 760, 2100),  # d and e start on b's GPU, c when both are free
    "slices": (600, 310, 860, 360, 760, 2100),
    "static": (600, 310, 860, 360, 760, 2100),
    "tiresias": (600, 310, 860, 360, 760, 2100),
    "easy": (600, 310, 700, 360, 1100, 2100),  # c has a reservation at 600: d ends before it, e would not
    # c shares both GPUs from 20 to 220, then d shares with a, and e with b until 600
    "sjf-ffs": (750, 600, 220, 320, 810, 2100),
    # e does not share: that would end both e and its partner later on average; it has b's GPU from 460 on
    "sjf-bsbf": (700, 460, 220, 320, 860, 2100),
    # rounds each minute; c is the oldest at 360 and has one of its two GPUs until 560
    "pollux": (660, 360, 560, 650, 1060, 2140),
    "halves": (600, 900, None, 950, 1350, 2100),  # training has one of the nodes
}


def test_figures_of_every_baseline_are_those_worked_out_by_hand(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "tiny.csv").write_text(TINY)
    text = """
        [cluster]
        nodes = 2
        gpus = 1
        mig = false
        [workload]
        trace = "joblog"
        path = "tiny.csv"
        """
    options = [word for name in BY_HAND for word in ("--policy", name)]
    done = CliRunner().invoke(simulate, [str(write(text)), "--json", *options])
    assert done.exit_code == 0, done.output
    found = {outcome["policy"]: outcome["figures"] for outcome in json.loads(done.output)["policies"]}
    submitted = (0, 10, 20, 30, 30, 2000)
    for name, ends in BY_HAND.items():
        took = [end - at for end, at in zip(ends, submitted, strict=True) if end is not None]
        figures = found[name]
        assert figures["all"]["jct_s"]["mean"]["mean"] == pytest.approx(sum(took) / len(took)), name
        assert figures["all"]["jct_s"]["max"]["mean"] == pytest.approx(max(took)), name
        assert figures["makespan_s"]["mean"] == pytest.approx(max(end or 0 for end in ends)), name
        # halves never runs c: the others are compared with it on the five jobs that it runs
        compared = [end - at for end, at, job in zip(ends, submitted, "abcdef", strict=True) if job != "c" and end]
        assert figures["compared"]["all"]["jct_s"]["mean"]["mean"] == pytest.approx(sum(compared) / 5), name


def test_waits_of_training_and_inference_are_told_where_there_are_both(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    head, *jobs = TINY.splitlines()
    lines = [f"{head},job_type", *(f"{job},{'service' if job[0] in 'de' else 'batch'}" for job in jobs)]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    base = BASE.replace("gpus = 2", "gpus = 1").replace("philly", "joblog", 1).replace("philly.csv", "log.csv")
    for infer, told in (("", 0), ('infer = ["service"]', 2)):
        path = write(base.replace("[policy]", f"{infer}\n[policy]"))
        output = CliRunner().invoke(simulate, [str(path), "--policy", "fifo"]).output
        assert output.count("mean wait of ") == told
    rows = {line.rpartition("  ")[0].strip(): line.rpartition("  ")[2] for line in output.splitlines()}
    assert rows["mean wait of training"] == "2.4 min"  # of a, b, f 0 s, of c 580 s
    assert rows["mean wait of inference"] == "11.2 min"  # 670 s each


@pytest.mark.parametrize("option", ["--html", "--log"])
def test_missing_directory_of_an_output_is_reported_before_the_simulation(tmp_path: Path, option: str) -> None:
    done = CliRunner().invoke(simulate, [str(tmp_path / "no.toml"), option, str(tmp_path / "no" / "r")])
    assert f"no such directory: {tmp_path / 'no'}: create it" in str(done.exception)


def test_unusable_directory_of_plots_is_reported_before_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(bench, ["lending", "--data", str(tmp_path), "--plot", str(tmp_path / "file" / "plots")])
    assert isinstance(done.exception, NotADirectoryError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("nodes = 2", "node = 2"), ":3: unknown key 'node', did you mean 'nodes'? in [cluster]"),
        (("nodes = 2", 'nodes = "2"'), ":3: cluster.nodes must be a whole number"),
        (("[cluster]", "[clusters]"), ":2: unknown section 'clusters', did you mean 'cluster'?"),
        (('"philly"', '"phily"'), ":6: workload.trace must be one of 'joblog', 'jobtable', 'philly', 'openb'"),
        (('"philly.csv"', '"none.csv"'), ":7: workload.path: "),
        (
            ('"philly.csv"', '"philly.csv"\ntres = ["1001=gpu"]'),
            ":8: workload.tres must be numbers with names, such as",
        ),
        (
            ('"philly.csv"', '"philly.csv"\ncolumns = ["gpus=gpu"]'),
            ':8: workload.columns must be such as "gpus=gpu_num": a column of the file, and submit_time, duration, ',
        ),
        (('"philly"', '"pollux"'), ":6: pollux workloads name no durations: workload.profiles is needed"),
        (('path = "philly.csv"', ""), ":5: [workload] needs path"),
        (('"easy"', '"easyy"'), ":9: unknown policy 'easyy', did you mean 'easy'?"),
        (('name = "easy"', "nam = 3"), ":9: unknown key 'nam' (known: config, auto, elastic,"),
        (('"easy"', '"easy"\ndept = 3'), ":10: unknown key 'dept', did you mean 'depth'? in [policy]"),
        (('"easy"', '"easy"\ndepth = 0'), ":10: policy.depth must be between 1 and 1e+06, not 0"),
        (('"easy"', '"easy"\n[speeds]\nkind = "table"'), ":11: speeds of kind 'table' need speeds.path"),
        (('"easy"', '"easy"\n[speeds]\nkind = "table"\npath = "x"'), ":12: speeds.path: "),
        (('"philly.csv"', '"philly.csv"\nmodels = "draw"'), ":8: models can only be drawn from a table"),
        (('"philly.csv"', '"philly.csv"\nbegin_s = 9\nend_s = 3'), ":8: workload.begin_s must be before end_s"),
        (('"easy"', '"easy"\n[speeds]\npairs = "x"'), ":11: speeds.pairs: "),
        (("nodes = 2", "neighbours = 0.1"), ":3: cluster.neighbours must be below neighbours_worst"),
        (("nodes = 2", "neighbours_worst = 0.0"), ":2: cluster.neighbours must be below neighbours_worst"),
        (('"easy"', '"easy'), ":9: is not valid TOML"),
    ],
)
def test_scenario_error_names_the_line_and_the_reason(
    write: Callable[..., Path], change: tuple[str, str], message: str
) -> None:
    path = write(BASE.replace(*change))
    with pytest.raises(ConfigError) as caught:
        scenario.load(path)
    assert f"{path}{message}" in str(caught.value)


def test_scenario_may_begin_with_a_byte_order_mark_but_not_be_nested_too_deeply(write: Callable[..., Path]) -> None:
    path = write(BASE)
    plain = scenario.load(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert scenario.load(path) == plain
    with pytest.raises(ConfigError, match=r"is not valid TOML: its lists or tables are nested too deeply"):
        scenario.load(write(f"{BASE}x = {'[' * 5000}"))


def test_trace_without_usable_jobs_reports_what_was_skipped(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text(
        "JobID|User|Submit|Start|Elapsed|State|AllocTRES\n"
        "4.batch||2026-01-01T00:00:00|2026-01-01T00:00:10|00:00:10|COMPLETED|cpu=1\n"
        "5|ann|2026-01-01T00:00:00|2026-01-01T00:00:10|00:00:10|COMPLETED|cpu=1\n"
    )
    done = CliRunner().invoke(simulate, [str(write(BASE.replace("philly.csv", "jobs.txt").replace("philly", "sacct")))])
    assert done.exit_code == 1
    assert "no jobs are left of" in str(done.exception) + done.output
    assert "1 steps of jobs are skipped; 1 jobs without a GPU are skipped" in str(done.exception) + done.output


def test_pairs_table_sets_the_slowdown_of_jobs_that_share_a_gpu(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mixed.csv").write_text(
        "name,time,application,num_replicas,batch_size,duration,num_task\na,0,x,1,8,100,-1\nb,10,y,1,8,20,-1\n"
    )
    (tmp_path / "pairs.csv").write_text("app1,app2,slowdown1,slowdown2\nx,y,1.25,2.0\n")
    text = BASE.replace("philly.csv", "mixed.csv").replace("philly", "mixed").replace("easy", "sjf-ffs")
    text = text.replace("nodes = 2\ngpus = 2", "nodes = 1\ngpus = 1\nmig = false")
    loaded = scenario.load(write(text + '[speeds]\npairs = "pairs.csv"\n'))
    first, second = play(loaded, ScenarioData(loaded), 0).runs
    assert second.ended == 10 + 20 * 2
    assert first.ended == pytest.approx(50 + 100 - 10 - 40 / 1.25)


def test_unix_times_are_counted_from_the_first_job(write: Callable[..., Path], tmp_path: Path) -> None:
    """Attained service of 60 GPUs grows by more than Tiresias can tell apart in one step of such a clock."""
    text = BASE.replace("philly.csv", "mixed.csv").replace("philly", "mixed").replace("easy", "tiresias")
    results = []
    for origin in (0, 1_700_000_000):
        lines = [f"j{n},{origin + n * 700.123456},x,{(60, 3)[n % 2]},8,{5000.7 + n},-1" for n in range(6)]
        (tmp_path / "mixed.csv").write_text(
            "\n".join(["name,time,application,num_replicas,batch_size,duration,num_task", *lines]) + "\n"
        )
        loaded = scenario.load(write(text.replace("nodes = 2\ngpus = 2", "nodes = 8\ngpus = 8")))
        data = ScenarioData(loaded)
        assert (UNIX_TIMES in data.trace.notices) == (origin > 0)
        results.append([run.ended for run in play(loaded, data, 0).runs])
    assert results[1] == pytest.approx(results[0], abs=0.01)


def test_models_without_speeds_are_named(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mixed.csv").write_text(
        "name,time,application,num_replicas,batch_size,duration,num_task\na,1,net,1,8,10,-1\nb,2,odd,1,8,10,-1\n"
    )
    text = BASE.replace("philly.csv", "mixed.csv").replace("philly", "mixed")
    path = write(text + '[speeds]\nkind = "table"\npath = "table.csv"\n')
    with pytest.raises(ConfigError, match=r"there are no train speeds of odd; .*\(it has big, net\)"):
        ScenarioData(scenario.load(path)).jobs(0)


@pytest.mark.slow
def test_models_are_drawn_from_those_that_fit_on_the_whole_gpu(write: Callable[..., Path]) -> None:
    path = write(
        BASE.replace("[policy]", 'models = "draw"\n[policy]').replace("nodes = 2", 'nodes = 2\ngpu = "a30"')
        + '[speeds]\nkind = "predictor"\npath = "table.csv"\n'
    )
    drawn = {job.app for job in ScenarioData(scenario.load(path)).jobs(0)}
    assert len(drawn) > 5 and "llama-3.1-8b" not in drawn
    path.write_text(path.read_text().replace('"predictor"', '"table"'))
    with pytest.raises(
        ConfigError, match=r"has jobs of kind train, and the speeds know no model .* NVIDIA A30: give a"
    ):
        ScenarioData(scenario.load(path)).jobs(0)


def test_tres_numbers_of_a_job_table_can_be_given_names(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "philly.csv").write_text(
        "id_job,id_user,state,time_submit,time_start,time_end,tres_alloc\n"
        '1,501,3,100,110,120,"1=2,1001=1,1003=8"\n2,501,3,100,110,120,"1=2,1002=1"\n'
    )
    text = BASE.replace('"philly"', '"jobtable"')
    assert [job.gpus for job in ScenarioData(scenario.load(write(text))).jobs(0)] == [8, 1]
    text = text.replace('"philly.csv"', '"philly.csv"\ntres = ["1001=gres/gpu:a100", "1002=gres/mig:1g.10gb"]')
    first, second = ScenarioData(scenario.load(write(text))).jobs(0)
    assert (first.gpus, str(second.profile)) == (1, "1g.10gb")


def test_columns_of_a_job_log_can_be_named(write: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "philly.csv").write_text("queued at,gpus=all,duration\n5,2,60\n9,1,70\n")
    names = '"philly.csv"\ncolumns = ["queued at=submit_time", "gpus=all = gpu_num"]'
    text = BASE.replace('"philly"', '"joblog"').replace('"philly.csv"', names)
    jobs = ScenarioData(scenario.load(write(text))).jobs(0)
    assert [(job.arrival, job.gpus, job.work) for job in jobs] == [(0, 2, 60), (4, 1, 70)]


def test_example_scenario_is_valid_once_filled_in_and_policies_are_listed(write: Callable[..., Path]) -> None:
    example = CliRunner().invoke(cli, ["simulate", "--example"]).output
    assert all(f"{trace}," in example or f"{trace}." in example for trace in scenario.TRACES)
    filled = example.replace('trace = "..."', 'trace = "philly"').replace('path = "..."', 'path = "philly.csv"')
    assert scenario.load(write(filled)).policy == "migbatch"
    uncommented = "\n".join(
        line[1:] if line.startswith("#") and " = " in line else line for line in filled.splitlines()
    )
    assert scenario.load(write(uncommented)).cluster.nodes == 1
    listed = CliRunner().invoke(cli, ["simulate", "--policies"]).output
    assert "tiresias" in listed
    assert CliRunner().invoke(cli, ["simulate"]).exit_code == 2


def test_simulator_benchmark_times_runs_and_fits_the_growth_exponent(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "philly_jobs.csv.gz").write_bytes(gzip.compress(PHILLY.encode()))
    result = simulator.measure(tmp_path, (1, 2))
    assert [run["jobs"] for run in result["runs"]] == [20, 40]
    assert [bar["name"] for bar in result["bars"]] == ["20 Philly jobs on 550 GPUs [s]", "time growth exponent"]
    assert exponent([(1, 3), (10, 300)]) == pytest.approx(2)
    assert exponent([(1, 3)]) is None
    with pytest.raises(FileNotFoundError):
        simulator.measure(tmp_path / "none")


def test_scale_benchmark_measures_small_sites() -> None:
    result = scale.measure(nodes=(2, 4), gpus=1, pending=5, rounds=2)
    assert [site["gpus"] for site in result["sites"]] == [2, 4]
    assert [bar["target"] for bar in result["bars"]] == [1.0, 0.1, 1.0, 0.1, scale.EXPONENT]
    assert all(site["first_s"] > 0 and site["later_s"] > 0 and site["peak_mib"] > 0 for site in result["sites"])
    assert result["decides"] == "slurm_migbatch.decide.core.decide"
