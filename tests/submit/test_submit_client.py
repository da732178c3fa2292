"""cli_filter.lua in a real Lua: sbatch passes at once, srun and salloc request what their steps can repeat."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, JobRequest
from slurm_migbatch.submit.shim import CLI_FILTER, render
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import LATER, LUA, Shim, plant_modules

ASK = """
local lines = {}
local function log_message(...) lines[#lines + 1] = string.format(...) end
slurm = { SUCCESS = 0, ERROR = -1, log_error = log_message, log_info = log_message, log_verbose = log_message }
local loaded = dofile(arg[1])
if type(loaded) == "table" then
  slurm_cli_setup_defaults, slurm_cli_pre_submit, slurm_cli_post_submit = loaded.after()
end
if arg[2] == "removed" then os.remove(arg[1]) end
local compiler = loadstring and "loadstring" or "load" -- the first in Lua 5.1
local real, compiled = _G[compiler], "compiled nothing"
_G[compiler] = function(...) compiled = "compiled more" return real(...) end
local options, given = {}, {}
for place = 3, #arg do
  local default, name, value = arg[place]:match("^(~?)(.-)=(.*)$")
  options[name] = value
  if default == "" then given[#given + 1] = ('"%s":"%s"'):format(name, value) end
end
function slurm.json_cli_options() return "{" .. table.concat(given, ",") .. "}" end
print(slurm_cli_pre_submit(options, 0))
print(options.gres)
print(compiled)
print(table.concat(lines, "|"))
print(options["tres-per-task"])
print(options.gpus or options["gpus-per-node"] or options["gpus-per-task"])
print(options.nodes)
print(options.export)
slurm_cli_post_submit(0, 17, 0)
print(os.getenv("MIGBATCH_SALLOC"))
"""


def ask(
    folder: Path,
    *options: str,
    module: bool = False,
    removed: bool = False,
    job: str | None = None,
    within: Mapping[str, str] = MappingProxyType({}),
    nodes: bool = False,
    export: bool = False,
    granted: bool = False,
) -> list[str]:
    """Return the result of a request by `options`, with ~ before those that Slurm shows though they are not given.

    That is the code, its GRES, whether more than the head was compiled, the messages, its TRES per task; `within` a job
    also its GPUs, with `nodes` also its nodes, with `export` also its environment, and if it is `granted` what salloc
    states of it.
    """
    text = render(
        CLI_FILTER,
        socket="/nonexistent",
        table="/nonexistent",
        catalog=SITE,
        policy=SubmitPolicy(trusted_uids=frozenset({4242})),
        default_partition="gpu",
        module=module,
    )
    (folder / CLI_FILTER).write_text(text)
    (folder / "ask.lua").write_text(ASK)
    line = [LUA, "ask.lua", str(folder / CLI_FILTER), "removed" if removed else "kept", *options]
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    environment |= {"SLURM_JOB_ID": job, **within} if job else {}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[: None if granted else -1 if export else -2 if nodes else -3 if within else -4]


@pytest.mark.parametrize(
    "options",
    [
        ("type=sbatch", "gres=mig:auto", "comment=migbatch: model=bert-large"),
        ("type=sbatch", "gpus=1"),
        ("type=salloc", "gres=fpga:1"),
        ("type=srun", "comment=hello"),
    ],
)
def test_request_that_needs_no_change_passes_without_compiling_the_rest(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    code, _, compiled, messages, _ = ask(tmp_path, *options)
    assert (code, compiled, messages) == ("0", "compiled nothing", "")


@pytest.mark.parametrize(("program", "granted"), [("srun", "mig:1"), ("salloc", "mig:auto")])
def test_modules_are_not_loaded_from_the_current_directory(tmp_path: Path, program: str, granted: str) -> None:
    """Lua 5.1 looks there first, and the directory in which somebody runs srun may be another user's, like /tmp."""
    plant_modules(tmp_path)
    code, gres, compiled, _, _ = ask(tmp_path, f"type={program}", "gres=mig:auto")
    assert (code, gres, compiled) == ("0", granted, "compiled more")
    assert not (tmp_path / "loaded").exists()


def test_rest_is_compiled_by_later_releases_of_lua_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUA_INIT", LATER)
    code, gres, compiled, messages, _ = ask(tmp_path, "type=srun", "gres=mig:auto")
    assert (code, gres, compiled) == ("0", "mig:1", "compiled more"), messages


def test_slurmctld_loads_no_modules_from_its_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is /var/tmp if it cannot write the directory of its log."""
    plant_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Shim(tmp_path, socket="/nonexistent") as shim:
        assert isinstance(shim(JobRequest(1001, partition="gpu", tres_per_node="gres:mig:1g.10gb:1")), Accept)
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize("module", [False, True], ids=["the script", "beside the site's own"])
def test_srun_auto_becomes_a_request_that_its_steps_can_repeat(tmp_path: Path, module: bool) -> None:
    code, gres, compiled, messages, _ = ask(tmp_path, "type=srun", "gres=mig:auto", module=module)
    assert (code, gres, compiled) == ("0", "mig:1", "compiled more")
    assert "for mig:auto" in messages


def test_request_that_slurmctld_would_refuse_is_refused_by_cli_filter(tmp_path: Path) -> None:
    code, _, _, messages, _ = ask(tmp_path, "type=salloc", "gres=mig:1g")
    assert code == "-1" and "full profile name" in messages


@pytest.mark.parametrize("option", ["cpus-per-gpu=4", "mem-per-gpu=4G", "gpu-freq=high", "ntasks-per-gpu=2"])
def test_options_that_apply_to_whole_gpus_are_refused(tmp_path: Path, option: str) -> None:
    """Slurm itself would miss the GPU that a slice has replaced."""
    code, _, _, messages, _ = ask(tmp_path, "type=srun", "gpus=1", option)
    assert code == "-1" and f"--{option.partition('=')[0]} applies to whole GPUs" in messages


@pytest.mark.parametrize(("quiet", "told"), [("0", True), ("1", False), ("2", False)])
def test_messages_are_left_out_with_quiet(tmp_path: Path, quiet: str, told: bool) -> None:
    """As slurmctld's, which Slurm's clients leave out; the second is shown with --verbose only."""
    code, gres, _, messages, _ = ask(tmp_path, "type=salloc", "gpus=1", f"quiet={quiet}")
    assert (code, gres, messages.count("7g.80gb for gpu:1")) == ("0", "mig:7g.80gb:1", 1 + told)
    code, _, _, messages, _ = ask(tmp_path, "type=salloc", "gpus=1000", f"quiet={quiet}")
    assert code == "-1" and "invalid number of slices" in messages


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("gpus=2",), False),
        (("nodes=2-3", "gpus=4"), False),
        (("nodes=2", "ntasks=2", "gpus=2"), True),  # one slice for each task, if they were requested as slices
    ],
)
def test_notes_that_slurmctld_gives_again_are_left_out(tmp_path: Path, options: tuple[str, ...], told: bool) -> None:
    _, _, _, messages, _ = ask(tmp_path, "type=salloc", *options)
    shown, _, verbose = messages.partition("|")
    assert shown.startswith("migbatch: ") and " on this partition a whole GPU is its largest slice" in shown
    assert "NCCL" in verbose and ("NCCL" in shown) is told


@pytest.mark.parametrize(("program", "variable"), [("salloc", "SALLOC"), ("srun", "SLURM")])
def test_variable_counts_less_than_slices_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, variable: str
) -> None:
    """Slurm shows both alike; `00` requests nothing."""
    asked = f"type={program}", "gres=mig:2g.20gb", "gpus=1"
    assert ask(tmp_path, *asked)[0] == "-1"
    monkeypatch.setenv(f"{variable}_GPUS", "1")
    code, gres, _, messages, _, gpus, _ = ask(tmp_path, *asked, nodes=True)
    assert (code, gres.removesuffix(":1"), gpus) == ("0", "mig:2g.20gb", "00")
    assert f"{variable}_GPUS in the environment is not applied beside --gres" in messages
    monkeypatch.delenv(f"{variable}_GPUS")
    monkeypatch.setenv(f"{variable}_GRES", "mig:2g.20gb")
    code, gres, *_, gpus, _ = ask(tmp_path, *asked, nodes=True)
    assert (code, gres, gpus) == ("0", "mig:7g.80gb:1", "00")


def test_gpus_per_task_become_slices_that_steps_can_repeat(tmp_path: Path) -> None:
    code, gres, _, _, _ = ask(tmp_path, "type=srun", "tres-per-task=gres/gpu:1", "nodes=1", "ntasks=2")
    assert (code, gres) == ("0", "mig:7g.80gb:2")


@pytest.mark.parametrize(
    ("asked", "gres"),
    [("gpus-per-task=1", "mig:7g.80gb:4"), ("gpus=4", "mig:7g.80gb:4"), ("tres-per-task=gres/mig:auto", "mig:4")],
)
def test_slices_of_all_tasks_are_requested_of_one_node(tmp_path: Path, asked: str, gres: str) -> None:
    """srun requests them per node from slurmctld, which would take any number of nodes."""
    answer = ask(tmp_path, "type=srun", asked, "nodes=1-0", "ntasks=4", nodes=True)
    assert (answer[0], answer[1], answer[-1]) == ("0", gres, "1")


@pytest.mark.parametrize(
    ("options", "gres"),
    [
        (("~ntasks=1", "ntasks-per-node=2", "nodes=2-2", "gpus-per-task=1"), "mig:7g.80gb:2"),
        (("ntasks=1", "ntasks-per-node=2", "nodes=1-1", "gpus-per-task=1"), "mig:7g.80gb:1"),
        (("~ntasks=1", "nodes=2-2", "gpus-per-task=1"), "mig:7g.80gb:1"),
        (("~ntasks=1", "gpus-per-task=1"), "mig:7g.80gb:1"),
    ],
)
def test_tasks_that_the_nodes_decide_get_their_slices(tmp_path: Path, options: tuple[str, ...], gres: str) -> None:
    """Slurm shows one task where --ntasks is not given (marked by ~ here)."""
    code, granted, _, messages, _ = ask(tmp_path, "type=salloc", *options)
    assert (code, granted) == ("0", gres), messages


@pytest.mark.parametrize("option", ["gpus", "gpus-per-node", "gpus-per-task"])
def test_gpus_of_several_types_all_become_slices(tmp_path: Path, option: str) -> None:
    asked = "type=salloc", f"{option}=h100:1,a100:2", "partition=mixed", "nodes=1", "ntasks=1"
    code, gres, *_ = ask(tmp_path, *asked)
    assert (code, gres) == ("0", "mig:7g.80gb:1,mig:7g.40gb:2")


def test_gpus_that_two_options_request_count_once(tmp_path: Path) -> None:
    code, gres, *_ = ask(tmp_path, "type=srun", "gpus-per-node=2", "gres=gpu:1", "nodes=1", "ntasks=1")
    assert (code, gres) == ("0", "mig:7g.80gb:1")


def test_gpus_per_socket_become_slices_that_steps_can_repeat(tmp_path: Path) -> None:
    code, gres, _, _, _ = ask(tmp_path, "type=srun", "gpus-per-socket=1", "sockets-per-node=2", "ntasks=1")
    assert (code, gres) == ("0", "mig:7g.80gb:2")


def test_request_passes_unchanged_if_the_script_has_been_removed(tmp_path: Path) -> None:
    """The script may just be being replaced; job_submit.lua checks the request all the same."""
    code, gres, _, messages, _ = ask(tmp_path, "type=srun", "gres=mig:auto", removed=True)
    assert (code, gres, messages) == ("0", "mig:auto", "")


@pytest.mark.parametrize("command", ["srun", "salloc"])
@pytest.mark.parametrize(
    ("asked", "gres", "per_task"),
    [
        ("gres/mig:auto", "mig:2", ""),
        ("gres/mig", "mig:2", ""),
        ("gres/mig:auto:2", "mig:4", ""),
        ("gres/mig=1", "mig:2", ""),
        ("cpu:3,gres/mig:auto", "mig:2", "cpu:3"),
    ],
)
def test_slices_per_task_without_a_profile_become_slices_per_node(
    tmp_path: Path, command: str, asked: str, gres: str, per_task: str
) -> None:
    """srun repeats its own request for its step, and the environment that salloc leaves is the step's request."""
    options = f"type={command}", f"tres-per-task={asked}", "nodes=1", "ntasks=2"
    code, *others, now = ask(tmp_path, *options)
    assert (code, others[0], now) == ("0", gres, per_task)


def test_slices_per_task_with_a_profile_stay_per_task(tmp_path: Path) -> None:
    options = "type=srun", "tres-per-task=gres/mig:1g.10gb+me", "gres=fpga:1", "nodes=1", "ntasks=1"
    code, gres, _, _, per_task = ask(tmp_path, *options)
    assert (code, gres, per_task) == ("0", "fpga:1", "gres/mig:1g.10gb.me:1")


@pytest.mark.parametrize(
    ("option", "value", "matches"),
    [
        ("gres", "mig:auto", "mig:1"),
        ("gres", "fpga:1,mig:auto:2", "fpga:1,mig:2"),
        ("gres", "mig:1g.10gb", "mig:1g.10gb"),
        ("tres-per-task", "gres/mig:auto", "gres/mig:1"),
        ("tres-per-task", "cpu:2,gres/mig:auto:2", "cpu:2,gres/mig:2"),
    ],
)
def test_a_step_that_asks_for_any_slices_gets_those_of_its_job(
    tmp_path: Path, option: str, value: str, matches: str
) -> None:
    code, gres, _, messages, per_task = ask(tmp_path, "type=srun", f"{option}={value}", job="17")
    assert (code, gres if option == "gres" else per_task, messages) == ("0", matches, "")


ONE_SLICE = {"MIGBATCH_JOB_SLICES": "1", "MIGBATCH_PROGRESS": "/run/migbatch/progress/17.0"}


@pytest.mark.parametrize(
    ("option", "gres", "gpus"),
    [
        ("gpus=1", "nil", "0"),
        ("gpus=h100:1", "nil", "0"),
        ("gpus-per-task=1", "nil", "0"),
        ("gpus-per-node=1", "nil", ""),
        ("tres-per-task=gres/gpu:1", "nil", "nil"),
        ("gres=gpu", "mig:1", "nil"),
        ("gres=gres/gpu:h100", "mig:1", "nil"),
        ("gres=gres:gpu:h100:1", "mig:1", "nil"),
        ("gpus=2", "nil", "2"),
        ("gpus-per-node=h100:11", "nil", "h100:11"),
        ("gres=gpu:2", "gpu:2", "nil"),
        ("gres=gpu:1,fpga:1", "gpu:1,fpga:1", "nil"),
    ],
)
def test_a_step_gets_the_one_slice_of_its_job_for_one_gpu(tmp_path: Path, option: str, gres: str, gpus: str) -> None:
    """The script of `sbatch --gpus=1` may request the GPU again in each step."""
    code, *others, per_task, left = ask(tmp_path, "type=srun", option, job="17", within=ONE_SLICE)
    assert (code, others[0], left) == ("0", gres, gpus)
    assert per_task == ("" if option.startswith("tres") else "nil")


@pytest.mark.parametrize(
    ("options", "slices", "nodes", "gres", "gpus"),
    [
        (("gpus=2",), 2, 1, "nil", "0"),
        (("gpus=h100:2", "ntasks=2"), 2, 1, "nil", "0"),
        (("gpus=4",), 2, 2, "nil", "0"),
        (("gpus=2", "nodes=1"), 2, 2, "nil", "0"),  # a step on one of the job's nodes
        (("gpus=4", "nodes=2-2"), 2, 2, "nil", "0"),
        (("gpus=4", "nodes=1"), 2, 2, "nil", "4"),
        (("gpus-per-node=2",), 2, 2, "nil", ""),
        (("gpus-per-task=1", "ntasks=2"), 2, 1, "nil", "0"),
        (("gpus-per-task=h100:2", "ntasks=2"), 2, 2, "nil", "0"),
        (("gres=gpu:2",), 2, 2, "mig:2", "nil"),
        (("gres=gpu:h100:3",), 3, 1, "mig:3", "nil"),
        (("gpus=1",), 2, 1, "mig:1", "0"),
        (("gpus=2",), 2, 2, "mig:1", "0"),
        (("gpus=1", "ntasks=1"), 2, 2, "mig:1", "0"),  # one task runs on one node
        (("gpus=1",), 2, 2, "nil", "1"),
        (("gpus=3",), 2, 2, "nil", "3"),
        (("gpus-per-node=1",), 2, 2, "mig:1", ""),
        (("gpus-per-task=1", "ntasks=1"), 2, 1, "mig:1", "0"),
        (("gpus-per-task=1", "ntasks=4"), 2, 1, "nil", "1"),
        (("gpus-per-task=1", "ntasks=2"), 1, 1, "nil", "1"),  # Slurm refuses it, as two tasks with one GPU each
        (("gpus-per-task=1", "ntasks=2"), 1, 2, "nil", "0"),
        (("gres=gpu:1",), 2, 2, "mig:1", "nil"),
        (("gpus=2", "gpus-per-task=1", "ntasks=2"), 3, 1, "mig:2", "0"),
        (("gpus=1", "gres=fpga:1"), 2, 1, "fpga:1,mig:1", "0"),
    ],
)
def test_a_step_gets_as_many_slices_of_its_job_as_it_requests_gpus(
    tmp_path: Path, options: tuple[str, ...], slices: int, nodes: int, gres: str, gpus: str
) -> None:
    """The script of `sbatch -n 2 --gpus=2` may request both again, or one in each of two steps."""
    within = {**ONE_SLICE, "MIGBATCH_JOB_SLICES": str(slices), "SLURM_JOB_NUM_NODES": str(nodes)}
    answer = ask(tmp_path, "type=srun", *options, job="17", within=within)
    assert (answer[0], answer[1], answer[-1]) == ("0", gres, gpus)


def test_a_step_in_another_job_is_not_compared_with_the_slices_of_its_own(tmp_path: Path) -> None:
    within = {**ONE_SLICE, "SLURM_JOB_NUM_NODES": "1"}
    answer = ask(tmp_path, "type=srun", "jobid=17", "gpus=2", "nodes=1", "ntasks=1", job="16", within=within)
    assert (answer[0], answer[1], answer[-1]) == ("0", "mig:2", "0")


NONE = "ALL,MIGBATCH_STEP_GRES=none"


@pytest.mark.parametrize(
    ("options", "environment", "export"),
    [
        (("gpus=0",), {}, NONE),
        (("gpus=h100:0",), {}, NONE),
        (("gpus-per-node=0",), {}, NONE),
        (("gres=gpu:0",), {}, NONE),
        (("gres=fpga:1,mig:1g.10gb:0",), {}, NONE),
        (("gres=none",), {}, NONE),
        (("gpus=0",), {"SLURM_GPUS": "0"}, "nil"),  # what job_submit.lua leaves of the job's own --gpus
        (("gpus=00",), {"SLURM_GPUS": "00"}, "nil"),  # what cli_filter.lua leaves of salloc's --gpus
        (("gpus=0",), {"SLURM_GPUS": "00"}, NONE),
        (("gpus-per-node=0",), {"SLURM_GPUS": "00"}, NONE),
        (("gpus=0", "gres=mig:1g.10gb:1"), {}, "nil"),
        (("gpus=0", "gpus-per-task=1"), {}, "nil"),
        (("gres=gpu:0", "tres-per-task=gres/mig:1g.10gb:1"), {}, "nil"),
        (("gpus-per-task=0",), {}, "nil"),  # ignored by Slurm since 23.11
        (("gres=fpga:1", "tres-per-task=gres/gpu:0"), {}, "nil"),
        (("ntasks=1",), {}, "nil"),
    ],
)
def test_a_step_that_requests_zero_gpus_sees_no_slice(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], export: str
) -> None:
    answer = ask(tmp_path, "type=srun", *options, job="17", within={**ONE_SLICE, **environment}, export=True)
    assert (answer[0], answer[-1]) == ("0", export)


def test_a_step_in_another_job_that_requests_zero_gpus_sees_no_slice(tmp_path: Path) -> None:
    answer = ask(tmp_path, "type=srun", "jobid=17", "gpus=0", export=True)
    assert (answer[0], answer[-1]) == ("0", NONE)
    assert ask(tmp_path, "type=srun", "jobid=unset", "gpus=0", export=True)[-1] == "nil", "it requests a job"


@pytest.mark.parametrize(
    ("option", "gres"), [("gpus=2", "mig:2"), ("gres=gres:gpu:1", "mig:1"), ("gpus-per-node=h100:1", "mig:1")]
)
def test_a_step_in_another_job_gets_its_slices_for_gpus(tmp_path: Path, option: str, gres: str) -> None:
    """`srun --jobid=17 --overlap --gpus=2`: that job may have slices of any profile."""
    code, now, _, messages, _ = ask(tmp_path, "type=srun", "jobid=17", option, "nodes=1", "ntasks=1")
    assert (code, now, messages) == ("0", gres, "")
    assert ask(tmp_path, "type=srun", "jobid=17", "gpus=60")[0] == "0", "that job may have them"


@pytest.mark.parametrize(
    ("options", "stated"),
    [
        (("type=salloc", "gpus=1"), "17:1"),
        (("type=salloc", "gres=gres:fpga:3,gres:mig:1g.10gb:2,gres:mig:2g.20gb"), "17:3"),  # as Slurm shows it
        (("type=salloc", "gres=mig:auto:2"), "17:2"),
        (("type=salloc", "gres=mig"), "17:1"),
        (("type=salloc", "gres=fpga:3"), "nil"),
        (("type=srun", "gpus=1"), "nil"),
    ],
)
def test_salloc_states_the_slices_of_its_job_to_its_shell(
    tmp_path: Path, options: tuple[str, ...], stated: str
) -> None:
    assert ask(tmp_path, *options, granted=True)[-1] == stated


@pytest.mark.parametrize(
    ("stated", "gres", "gpus"),
    [("17:1", "nil", "0"), ("16:1", "nil", "1"), ("17:2", "mig:1", "0"), ("17:", "nil", "1")],
)
def test_a_step_in_a_shell_of_salloc_gets_the_slice_for_its_gpu(
    tmp_path: Path, stated: str, gres: str, gpus: str
) -> None:
    answer = ask(tmp_path, "type=srun", "gpus=1", job="17", within={"MIGBATCH_SALLOC": stated})
    assert (answer[0], answer[1], answer[-1]) == ("0", gres, gpus)


@pytest.mark.parametrize("option", ["cpus-per-gpu=4", "mem-per-gpu=4G", "ntasks-per-gpu=2"])
def test_a_step_in_a_job_with_slices_is_told_of_the_option_for_them(tmp_path: Path, option: str) -> None:
    """Slurm says only that its generic resources are invalid."""
    code, _, _, messages, *_ = ask(tmp_path, "type=srun", option, job="17", within=ONE_SLICE)
    assert code == "-1" and f"--{option.partition('=')[0]} applies to whole GPUs: for slices use --" in messages
    unset = "cpus-per-gpu=0", "ntasks-per-gpu=-2"
    assert ask(tmp_path, "type=srun", *unset, job="17", within=ONE_SLICE)[0] == "0"
    elsewhere = {**ONE_SLICE, "MIGBATCH_PROGRESS": "/run/migbatch/progress/16.0"}
    assert ask(tmp_path, "type=srun", option, job="17", within=elsewhere)[0] == "0"


def test_a_step_keeps_what_else_it_requests_per_task(tmp_path: Path) -> None:
    answer = ask(tmp_path, "type=srun", "tres-per-task=cpu:2,gres/gpu:1", job="17", within=ONE_SLICE)
    assert (answer[0], answer[-2]) == ("0", "cpu:2")


@pytest.mark.parametrize(
    "within",
    [
        {"MIGBATCH_JOB_SLICES": "1", "MIGBATCH_PROGRESS": "/run/migbatch/progress/16.0"},  # inherited from another job
        {"MIGBATCH_JOB_SLICES": "1"},
    ],
)
def test_a_step_of_any_other_job_keeps_its_gpus(tmp_path: Path, within: dict[str, str]) -> None:
    for option, place in (("gpus=1", -1), ("gres=gpu:1", 1), ("tres-per-task=gres/gpu:1", -2)):
        answer = ask(tmp_path, "type=srun", option, job="17", within=within)
        assert answer[place] == option.partition("=")[2]
