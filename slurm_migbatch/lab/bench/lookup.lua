-- Times what slurmctld's shim does by itself while the service is away: lua5.1 lookup.lua job_submit.lua table.lua n
-- Prints two lines of microseconds per call, one figure for each hundred calls: the look-up in the compiled table
-- (figures of one bucket), and the whole answer (hints, bucket, look-up, choice, marker). The third line has the
-- milliseconds of opening the table.
local shim, table_path, rounds = arg[1], arg[2], tonumber(arg[3])

slurm = { SUCCESS = 0, ERROR = -1, log_user = function() end, log_error = function() end }
dofile(shim)

-- the shim exports nothing but Slurm's entry points; what they use is found among their upvalues
local function find(name, from, seen)
  for index = 1, 250 do
    local key, value = debug.getupvalue(from, index)
    if not key then return nil end
    if key == name then return value end
    if type(value) == "function" and not seen[value] then
      seen[value] = true
      local found = find(name, value, seen)
      if found then return found end
    end
  end
end

local core = find("core", slurm_job_submit, {})
local site = assert(core.open(table_path), "no compiled table")
local submit = find("submit", core.rewrite, {})
local figures_of = find("figures_of", submit, {})
local bucket_of = find("bucket_of", submit, {})
local view = find("view", submit, {})

local names = {}
for name in pairs(site.partitions) do names[#names + 1] = name end
table.sort(names)
local models = {}
for name in pairs(site.models) do models[#models + 1] = name end
table.sort(models)

local jobs = {}
for index = 1, 100 do
  local model = models[index % #models + 1]
  jobs[index] = {
    uid = 1000, user = "ann", partition = names[1], tres_per_node = "gres:mig:auto",
    comment = "migbatch: model=" .. model .. " batch=" .. 2 ^ (index % 8) .. " slo=" .. 50 + 7 * index .. "ms",
  }
end

local partition, buckets = view(site, { names[1] }), {}
for index, job in ipairs(jobs) do
  buckets[index] = bucket_of(site, core.hints({ job.comment }))
end

local function time(work)
  local figures = {}
  for round = 1, rounds do
    local began = os.clock()
    for index = 1, 100 do work(index) end
    figures[round] = ("%.3f"):format((os.clock() - began) * 1e4)
  end
  print(table.concat(figures, " "))
end

for index, job in ipairs(jobs) do
  local answer, fault = core.rewrite(site, job)
  assert(answer and answer.verdict == "accept", fault or answer.message)
  assert(next(figures_of(site, partition, buckets[index])), "the bucket is not in the table")
end
collectgarbage()
time(function(index) figures_of(site, partition, buckets[index]) end)
time(function(index) core.rewrite(site, jobs[index]) end)

local opened = {}
for round = 1, 20 do
  local began = os.clock()
  core.open(table_path).file:close()
  opened[round] = ("%.4f"):format((os.clock() - began) * 1e3)
end
print(table.concat(opened, " "))
