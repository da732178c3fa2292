"""Add calls of migbatch to a site's own scripts: `job_submit.lua`, `cli_filter.lua`, Prolog, Epilog, TaskProlog.

Standard library only, for compute nodes.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from pathlib import PurePosixPath
from typing import Final

from slurm_migbatch.mig.grant import CHANGED, MARKER_OPEN
from slurm_migbatch.node import exits

_SHELL: Final = re.compile(r"#!\s*(?:\S*/env\s+)?(?:\S*/)?(?:ba|da|k|z)?sh(?:\s|$)")
_LUA: Final = re.compile(
    r"--\[(=*)\[[\s\S]*?\]\1\]|--[^\n]*|\[(=*)\[[\s\S]*?\]\2\]"  # remarks, and texts of several lines
    r"""|"(?:\\[\s\S]|[^"\\])*"|'(?:\\[\s\S]|[^'\\])*'|(?P<word>[A-Za-z_]\w*)"""
)
_OPENS: Final = frozenset({"function", "do", "if", "repeat"})
_CLOSES: Final = frozenset({"end", "until"})
_FUNCTIONS: Final = {
    "migbatch_submit.lua": ("slurm_job_submit", "slurm_job_modify"),
    "migbatch_cli_filter.lua": ("slurm_cli_setup_defaults", "slurm_cli_pre_submit", "slurm_cli_post_submit"),
}
BESIDE: Final = {"job_submit.lua": "migbatch_submit.lua", "cli_filter.lua": "migbatch_cli_filter.lua"}
"""Names of migbatch's scripts for sites with scripts of their own, which load them."""
SEVERAL: Final = {"Prolog": (24, 11), "Epilog": (24, 11)}
"""The oldest release on which several lines of a key are known to run all of their programs; 22.05 runs the last."""
PRIMARY: Final = {"migbatch-primary_on": True, "migbatch-primary_off": False}
"""Names of the programs of `primary_program` beside slurm.conf, and their purpose."""
_SHARE: Final = """\
# In a container of pyxis, where Slurm runs this, each task gets its share of the container's slices, as outside.
if [ ! -e HOOK ] && [ -n "${MIGBATCH_DEVICES-}" ] && [ "${CUDA_VISIBLE_DEVICES-}" = "$MIGBATCH_DEVICES" ]; then
    case ${SLURM_STEP_ID:-x}${SLURM_LOCALID:-x} in *[!0-9]*) exit 0 ;; esac
    [ "$SLURM_STEP_ID" -lt 4294967280 ] || exit 0 # not a step of srun
    pick() {
        picked='' i=0
        for item; do
            if [ $i -ge $first ] && [ $i -lt $last ]; then picked=${picked:+$picked,}$item; fi
            i=$((i + 1))
        done
    }
    IFS=,
    set -f -- ${SLURM_GTIDS-}
    tasks=$#
    [ "$tasks" -gt "$SLURM_LOCALID" ] || tasks=$((SLURM_LOCALID + 1))
    set -- $MIGBATCH_DEVICES
    if [ "$tasks" -ge $# ]; then
        first=$((SLURM_LOCALID % $#)) last=$((SLURM_LOCALID % $# + 1))
    else
        first=$((SLURM_LOCALID * $# / tasks)) last=$(((SLURM_LOCALID + 1) * $# / tasks))
    fi
    pick "$@"
    echo "export CUDA_VISIBLE_DEVICES=$picked"
    echo "export MIGBATCH_DEVICES=$picked"
    echo "export MIGBATCH_SLICES=$((last - first))"
    pick ${MIGBATCH_PROFILE-}
    echo "export MIGBATCH_PROFILE=$picked"
    exit 0
fi
"""
"""Part of the program for TaskProlog; see `node/task_prolog.py`, `share`."""
DRIVER: Final = "/dev/nvidiactl"
"""A path that exists on nodes with NVIDIA's driver."""
OURS: Final = "-- Written by migbatch from"
"""First line of a rendered Lua script, on any host."""
DOES_NOTHING: Final = """\
-- Written by `migbatch install`: this host has no other cli_filter.lua, and without one every srun, salloc and sbatch
-- fails. It changes nothing. It can be replaced by the controller's cli_filter.lua.
function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
  return slurm.SUCCESS
end

return slurm.SUCCESS
"""


def plugins(value: str) -> list[str]:
    """Return the names in CliFilterPlugins= or JobSubmitPlugins=, without a prefix such as `cli_filter/`: "lua"."""
    return [plugin.strip().rpartition("/")[2] for plugin in value.lower().split(",")]


def calls_lua(text: str, own_file: str) -> bool:
    """Return whether a site's Lua script loads migbatch's file of that path."""
    name = re.escape(PurePosixPath(own_file).name)
    return re.search(rf"^[^\n-]*\bdofile\b[^\n]*{name}", text, re.MULTILINE) is not None


def loaded(text: str, name: str) -> str:
    """Return the path of migbatch's file of that name that a site's Lua script loads; empty if it loads none."""
    found = re.search(rf'^[^\n-]*\bdofile\b[^\n"]*"([^\n"]*/{re.escape(name)})"', text, re.MULTILINE)
    return found[1] if found else ""


def call_lua(text: str, own_file: str) -> str:
    """Return a site's Lua script with two lines that call migbatch's functions after its own.

    Args:
        text: the script, which defines Slurm's functions as globals.
        own_file: full path of `migbatch_submit.lua` or `migbatch_cli_filter.lua`.
    """
    if calls_lua(text, own_file):
        return text
    name = PurePosixPath(own_file).name
    names = ", ".join(_FUNCTIONS[name])
    quoted = own_file.replace("\\", "\\\\").replace('"', '\\"')
    load, call = f'local migbatch = dofile("{quoted}")', f"{names} = migbatch.after({names})"
    if name == BESIDE["cli_filter.lua"]:
        # slurmctld sends cli_filter.lua to configless hosts, without ours, and an error in it ends every submission
        load, call = f'local found, migbatch = pcall(dofile, "{quoted}")', f"if found then {call} end"
    lines = f"{load} -- by `migbatch install`\n{call}\n"
    place = _last_return(text)
    before = text[:place]
    return before + ("" if not before or before.endswith("\n") else "\n") + lines + text[place:]


def _last_return(text: str) -> int:
    """Return where the statement begins with which a Lua script returns, its indentation included; else its end.

    Only the last statement of a script, outside of all blocks, may be one; it may have several lines.
    """
    depth = 0
    for token in _LUA.finditer(text):
        word = token["word"]
        if word == "return" and not depth:
            line = text.rfind("\n", 0, token.start()) + 1
            return token.start() if text[line : token.start()].strip() else line
        depth += (word in _OPENS) - (word in _CLOSES)
    return len(text)


def is_shell(text: str) -> bool:
    """Return whether a script is run by a shell of the Bourne family."""
    return _SHELL.match(text) is not None


def hook_line(hook: str) -> str:
    """Return the line with which a shell script runs one of migbatch's hooks; nodes without GPUs skip it."""
    check = f"; {_lost(hook)}" if _lost(hook) else ""
    return f"[ ! -e {hook} ] || {hook} || exit $?{check} # by `migbatch install`: the job's MIG slices"


def beside_slurm_conf(hook: str) -> str:
    """Return the name of the program beside slurm.conf that runs a hook, given the hook's name."""
    return f"migbatch-{hook}"


def stub(hook: str) -> str:
    """Return a program that runs one of migbatch's hooks, for a path shared with nodes without GPUs."""
    contained = _SHARE.replace("HOOK", hook) if PurePosixPath(hook).name == "task_prolog" else ""
    return (
        "#!/bin/sh\n"
        "# Written by `migbatch install`; do not edit. Nodes without migbatch have no slices.\n"
        f"{_lost(hook)}\n{contained}[ -e {hook} ] || exit 0\nexec {hook}\n"
    )


def _lost(hook: str) -> str:
    """Return the command that ends a Prolog if migbatch's is missing, the node has GPUs and the job was granted slices.

    Otherwise its tasks would run with any slices they find; so the Prolog fails, and slurmd drains the node. But the
    comment of a job that was updated may have a marker while Slurm has allocated no slices (`mig.grant.CHANGED`): by
    that any user could drain nodes that have other GPUs.
    """
    if PurePosixPath(hook).name != "prolog":
        return ""
    advice = f"migbatch: {hook} is missing, so jobs get no MIG slices; run: migbatch install --role node --apply"
    end = f"echo '{advice}' >&2; exit {exits.INSTALLATION}"
    cases = f'*"{MARKER_OPEN}"*"#{CHANGED}"*) ;; *"{MARKER_OPEN}"*) {end};;'
    return f'[ ! -e {hook} ] && [ -e {DRIVER} ] && case "${{SLURM_JOB_COMMENT-}}" in {cases} esac'


def primary_program(python: str, socket: str, *, on: bool) -> str:
    """Return the program that slurmctld runs when it becomes the primary of several (`on`), or no longer is.

    It reports this to its host's migbatchd, at the unix socket `socket`. If that is not running no report is needed: it
    asks Slurm when it starts.
    """
    state, event = ("on", "becomes the primary") if on else ("off", "is no longer the primary")
    return (
        f"#!{python} -ISB\n"
        f'"""Written by `migbatch install`; not to be edited. slurmctld runs it when it {event}."""\n'
        "import contextlib\n"
        "import socket\n\n"
        "with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:\n"
        "    link.settimeout(5)\n"
        f'    link.connect("{socket}")\n'
        f'    link.sendall(b"POST /v1/primary/{state} HTTP/1.1\\r\\n"\n'
        '                 b"Host: migbatchd\\r\\nContent-Length: 0\\r\\n\\r\\n")\n'
        "    link.recv(64)\n"
    )


def calls_hook(text: str, hook: str) -> bool:
    """Return whether a script names migbatch's hook in a line that is not a comment."""
    return re.search(rf"^[^#\n]*{re.escape(hook)}(?![\w/.-])", text, re.MULTILINE) is not None


def hides_slices(text: str, hook: str) -> bool:
    """Return whether a TaskProlog may print CUDA_VISIBLE_DEVICES after migbatch's: the last line counts."""
    later = text.rpartition(hook)[2].partition("\n")[2]
    return re.search(r"^[^#\n]*\b(?:export|unset) +CUDA_VISIBLE_DEVICES\b", later, re.MULTILINE) is not None


def call_hook(text: str, hook: str) -> str:
    """Return a shell script that runs migbatch's hook first, right below its `#!` line."""
    if calls_hook(text, hook):
        return text
    first, newline, rest = text.partition("\n")
    return f"{first}{newline or chr(10)}{hook_line(hook)}\n{rest}"


def is_pattern(path: str) -> bool:
    """Return whether Slurm expands the value of Prolog= or Epilog= to several programs."""
    return any(char in path for char in "*?[")


def programs_of(value: str) -> tuple[str, ...]:
    """Return the paths that Slurm runs for a value of Prolog= or Epilog=, which may be a pattern."""
    return tuple(sorted(glob.glob(value))) if is_pattern(value) else (value,)  # noqa: PTH207 - an absolute pattern


def name_in(pattern: str) -> str:
    """Return a path for migbatch's program that a pattern matches; empty if there is none.

    Its name is the last in the alphabet, because Slurm runs the programs of a pattern in descending order.
    """
    path = PurePosixPath(pattern)
    if is_pattern(str(path.parent)):
        return ""
    name = re.sub(r"\[[^\]]*\]|\?", "9", path.name).replace("*", "zz-migbatch", 1).replace("*", "")
    return str(path.parent / name) if fnmatch.fnmatchcase(name, path.name) else ""
