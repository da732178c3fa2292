"""Run the rendered job_submit.lua in a real Lua, with a `slurm` table as strict as slurmctld's.

One process answers many requests: each is a message of the submit protocol with the job's fields as in slurmctld; the
answer is a message with the return code, the output for the user and the fields that were set.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from slurm_migbatch.mig.grant import CHANGED
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, Answer, JobRequest, Pass, Refuse
from slurm_migbatch.submit.shim import JOB_SUBMIT, render
from slurm_migbatch.workload.catalog import SiteCatalog
from tests.support.gpu_kinds import SITE

LUA = os.environ.get("MIGBATCH_TEST_LUA", "lua5.1")
"""The interpreter; another one must find lua-posix too. That for lua5.4 is in a root of trixie, not in Debian 12: set
LUA_PATH_5_4="ROOT/usr/share/lua/5.4/?.lua;ROOT/usr/share/lua/5.4/?/init.lua" and
LUA_CPATH_5_4="ROOT/usr/lib/x86_64-linux-gnu/lua/5.4/?.so".
"""
INTERPRETERS = tuple(filter(shutil.which, ("lua5.1", "lua5.2", "lua5.3", "lua5.4", "lua5.5", "luajit")))
"""Those that are installed: slurmctld is linked to 5.1 on Debian, to 5.3 or 5.4 on Red Hat."""
LATER = """
if loadstring then
  local compile, within = loadstring, setfenv
  load = function(source, name, _, environment)
    local chunk, problem = compile(source, name)
    return chunk and environment and within(chunk, environment) or chunk, problem
  end
  table.unpack = unpack
  loadstring, setfenv, getfenv, unpack, module = nil, nil, nil, nil, nil
end
"""
"""LUA_INIT with which Lua 5.1 has the functions of 5.2 and later: slurmctld is linked to 5.3 or 5.4 on Red Hat."""

HARNESS = r"""
local messages, errors = {}, {}

-- with a second argument: instructions of Lua, and bytes that its string functions look at or make
local steps = 0
local find = string.find

-- A pattern that must end with the text, but may begin anywhere, is tried from every byte on.
local function tried(text, pattern)
  if pattern:sub(1, 1) == "^" or pattern:sub(-1) ~= "$" then return #text end
  local looked, beginning = 0, "^" .. pattern:sub(1, -2)
  for at = 1, #text do
    local _, to = find(text, beginning, at)
    looked = looked + (to or at) - at + 1
    if find(text, "^" .. pattern, at) then break end
  end
  return looked
end

local function counting(name, cost)
  local original = string[name]
  string[name] = function(...)
    local results = { original(...) }
    steps = steps + cost(results[2] or 0, results[1] or "", ...)
    return (unpack or table.unpack)(results, 1, 8)
  end
end
if arg[2] then
  for name in ("lower upper gsub gmatch"):gmatch("%S+") do
    counting(name, function(_, _, text) return #text end)
  end
  for name in ("sub format"):gmatch("%S+") do counting(name, function(_, result) return #result end) end
  counting("match", function(_, _, text, pattern) return tried(text, pattern) end)
  counting("find", function(to, from, text, pattern, start, plain)
    if not plain and pattern:sub(-1) == "$" then return tried(text, pattern) end
    return (from ~= "" and to or #text) - (start or 1) + 1
  end)
  debug.sethook(function() steps = steps + 1 end, "", 1) -- by hundreds, equal calls would differ by thousands
end
slurm = setmetatable({
  SUCCESS = 0, ERROR = -1,
  log_user = function(...) messages[#messages + 1] = string.format(...) end,
  log_error = function(...) errors[#errors + 1] = string.format(...) end,
  log_info = function(...) messages[#messages + 1] = string.format(...):gsub("^migbatch: job [^:]*: ", "") end,
  reservations = { bare = { node_list = "n1" }, whole = { node_list = "migcatalog,n1" } },
}, { __index = function(_, name) error("slurm." .. name .. " is not used by this shim") end })

local STRINGS, NUMBERS = {}, {}
for name in ("script user_name partition tres_per_node tres_per_job tres_per_socket tres_per_task " ..
  "name account comment extra cpus_per_tres mem_per_tres tres_freq tres_bind req_nodes exc_nodes features " ..
  "reservation"):gmatch("%S+") do STRINGS[name] = true end
for name in ("cpus_per_task ntasks_per_tres ntasks_per_node sockets_per_node shared requeue"):gmatch("%S+") do
  NUMBERS[name] = 65534
end
for name in ("user_id min_nodes max_nodes num_tasks job_id job_state het_job_offset"):gmatch("%S+") do
  NUMBERS[name] = 4294967294
end
NUMBERS.array_job_id = 0
NUMBERS.pn_min_memory = 18446744073709551614
local SETTABLE = {
  requeue = true, min_nodes = true, max_nodes = true, ntasks_per_node = true, cpus_per_task = true, min_cpus = true,
  pn_min_memory = true, ntasks_per_tres = true, num_tasks = true,
}

local function record(fields, set, environment)
  return setmetatable({}, {
    __index = function(_, name)
      if set and set[name] ~= nil then return set[name] end
      if name == "script" then return fields.batch == "1" and (fields.given_script or "#!/bin/sh") or nil end
      if name == "environment" then return environment end
      if name == "argv" then return fields.given_argv and { [0] = "job.sh", fields.given_argv } or nil end
      if name == "reservation" then return fields.uncatalogued == "1" and "bare" or nil end
      if STRINGS[name] then return fields[name] end
      if name == "pn_min_memory" and fields.memory_given == "1" then return 1000.0 end
      -- slurmctld's numbers are floating-point ones, which Lua 5.3 and later show as 1.0
      if NUMBERS[name] then return (tonumber(fields["given_" .. name] or fields[name]) or NUMBERS[name]) + 0.0 end
      error("no field " .. tostring(name))
    end,
    __newindex = function(_, name, value)
      if not set then error("job_ptr is read-only") end
      local known = STRINGS[name] or SETTABLE[name]
      if not known then error("field " .. tostring(name) .. " cannot be set") end
      if type(value) ~= "string" then error("bad argument: string expected, got " .. type(value)) end
      set[name] = value
    end,
  })
end

local function decode(line)
  return (line:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end))
end
local function encode(text)
  return (text:gsub("[^A-Za-z0-9]", function(char) return string.format("%%%02X", char:byte()) end))
end

dofile(arg[1])
local parts = { gpu = { flag_default = 1 }, cpu = { flag_default = 0 } }
while true do
  local fields, now, line = {}, {}, io.read("*l")
  if not line then break end
  while line ~= "" do
    local key, value = line:match("^([a-z_]+)=(.*)$")
    if key:sub(1, 4) == "now_" then now[key:sub(5)] = decode(value) else fields[key] = decode(value) end
    line = io.read("*l")
  end
  messages, errors = {}, {}
  local set, environment, rc = {}, { SLURM_TRES_PER_TASK = fields.given_environment }, nil
  local given = "MIGBATCH_BATCH MIGBATCH_COPIES MIGBATCH_ADVISED SLURM_GPUS SBATCH_GPUS SBATCH_GRES"
  for name in given:gmatch("%S+") do
    environment[name] = fields["given_" .. name:lower()]
  end
  local uid = tonumber(fields.uid) + 0.0
  steps = 0
  if fields.kind == "modify" then
    now.job_state = now.pending == "1" and 0 or 1
    now.min_nodes, fields.min_nodes = fields.min_nodes, nil -- the job's, unless an update is `given` another
    rc = slurm_job_modify(record(fields, set), record(now), parts, uid)
  else
    rc = slurm_job_submit(record(fields, set, environment), parts, uid)
  end
  io.write("steps=", steps, "\n", "rc=", rc, "\n", "messages=", encode(table.concat(messages, "|")), "\n", "errors=",
    encode(table.concat(errors, "|")), "\n")
  for name, value in pairs(set) do io.write("set_", name, "=", encode(value), "\n") end
  for name, value in pairs(environment) do io.write("env_", name:lower(), "=", encode(value), "\n") end
  io.write("\n")
  io.flush()
end
"""


def finds_posix(lua: str) -> bool:
    """Return whether an interpreter finds lua-posix."""
    return subprocess.run([lua, "-e", "require 'posix.sys.stat'"], check=False, capture_output=True).returncode == 0


def plant_modules(folder: Path) -> None:
    """Write modules with the names of lua-posix's into a folder; loading one creates the file `loaded` there."""
    names = ("errno", "stdlib", "sys/socket", "sys/stat", "time", "unistd")
    for name in ("posix", *(f"posix/{name}" for name in names)):
        module = folder / f"{name}.lua"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f'io.open("{folder}/loaded", "w"):close()\n')


class Shim:
    """The shim as slurmctld runs it: `shim(request)` returns its answer to a request."""

    def __init__(
        self,
        folder: Path,
        *,
        table: str = "/nonexistent",
        socket: str = "",
        catalog: SiteCatalog = SITE,
        policy: SubmitPolicy | None = None,
        deadline_ms: int = 2000,  # long, so that on a slow machine the service answers and not the table
        rest_s: int = 5,
        count_steps: bool = False,
        lua: str = LUA,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        source = render(
            JOB_SUBMIT,
            socket=socket,
            table=table,
            catalog=catalog,
            policy=policy or SubmitPolicy(),
            deadline_ms=deadline_ms,
        )
        source = source.replace(f"{deadline_ms}, 5\n", f"{deadline_ms}, {rest_s}\n", 1)
        script, harness = folder / "job_submit.lua", folder / "harness.lua"
        script.write_text(source, encoding="utf-8")
        harness.write_text(HARNESS, encoding="utf-8")
        self.errors: list[str] = []
        self.environment: dict[str, str] = {}
        self.steps = 0
        self.changed = False
        self.code = 0
        self._process = subprocess.Popen(
            [lua, str(harness), str(script), *(["count"] if count_steps else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def __call__(self, request: JobRequest, **more: str) -> Answer:
        """Return the shim's answer.

        Set `errors` to its log_error lines, `environment` to the variables that it set for a batch job, `steps` to its
        cost (with `count_steps`), `code` to the error code for Slurm, and `changed` to whether the marker says that a
        job update wrote it; the marker in the answer is as the service writes it. `more`: further job fields (`script`,
        `argv`, `environment`: the SLURM_TRES_PER_TASK in it, `slurm_gpus`, `migbatch_batch` and so on: the variables of
        that name in it).
        """
        assert self._process.stdin and self._process.stdout
        message = protocol.encode({**request.to_fields(), **{f"given_{name}": text for name, text in more.items()}})
        self._process.stdin.write(message.replace(b"\0", b"%00"))  # Lua's io.read ends a line at a NUL
        self._process.stdin.flush()
        reply = b""
        while not reply.endswith(b"\n\n"):
            line = self._process.stdout.readline()
            assert line, "the shim has died"
            reply += line
        fields = protocol.decode(reply)
        self.steps = int(fields["steps"])
        self.environment = {key[4:].upper(): value for key, value in fields.items() if key.startswith("env_")}
        self.errors = [fields["errors"]] if fields["errors"] else []
        self.code = int(float(fields["rc"]))
        if self.code:
            return Refuse(fields["messages"], "")
        changes = {key[4:]: value for key, value in fields.items() if key.startswith("set_")}
        match = re.search(rf"(?<=[0-9])#{CHANGED}(?=[0-9a-z]*\]$)", changes.get("comment", ""))
        self.changed = match is not None
        if match is not None:
            comment = changes["comment"]
            ending = comment[match.end() :]
            changes["comment"] = comment[: match.start()] + (ending if ending == "]" else f"#{ending}")
        return Accept(changes, fields["messages"]) if changes else Pass(fields["messages"])

    def __enter__(self) -> Shim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(120)
