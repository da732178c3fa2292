"""Simulate GPU clusters with MIG by an event-driven simulator, for baselines and the policies of papers.

migbatchd's own decision runs on the simulated Slurm of `lab.slurm` (`policies.migbatch`), with the same jobs, speeds
and figures.

The modules, each based on those before it:

- `job`: `SimulatedJob`, `JobCosts` are immutable values, the workload. Work is in
  seconds at speed 1.
- `run`: `SimulatedRun` is the history of one job, from its arrival through all interruptions to its end. Policies read
  it (`remaining(now)`, `attained(now)`, `end()`, `places`, `note`) and never change it, except `note`.
- `gpus`: `geometry("a100-80gb")` with MIG, `whole("a100-80gb")` without.
- `cluster`: `SimulatedCluster.of(geometry, gpus)`; `Place(gpu, slot)`; `SimulatedGpu.used` (held slots),
  `SimulatedGpu.layout` (idle instances too); `cluster.empty` and `cluster.alike[geometry, used]` are sets of GPUs as
  bits (`lowest`, `bit_indexes`).
- `placing`: first fit, best fit and packed whole GPUs over `mig.planning`.
- `speeds`: `Speeds` (a Protocol: `speed(job, places)` and `slowdown(run, others)`) with `Whole`, `Linear` and
  `Paired` (another `Speeds` with measured slowdowns of pairs); `Neighbours` is the slowdown by busy slices on the same
  GPU.
- `curves`: `Curves`, the `Speeds` of real models, over a measured `Table` or predictions (`Predicted`).
- `policy`: `Policy`, the base of all (`begin`, `arrive`, `complete`, `timer`, `decide`).
- `engine`: `Simulation(cluster, jobs, policy, speeds, ...)` with the actions `start`, `move`, `preempt`, `wake`, and
  `run(until)`, which returns a `result.SimulationResult`.
- `metrics`: `summarise(result)`; `over_seeds` gives means with their intervals. `log`, `spans`: the events.
- `policies`: baselines and policies of papers; `registry` has all policies by name for scenarios, `migbatch` among
  them.
- `lab.traces`: readers of public traces and of a site's own; all return `Trace`.
- `scenario` (a TOML file), `play`, `plots`, `page`: the parts of `migbatch simulate`.

A custom policy::

    class Mine(Policy):
        def begin(self, sim):
            self.queue = []

        def arrive(self, sim, run):
            self.queue.append(run)

        def decide(self, sim):
            # call a pure function of `lab.papers` or `decide`, then act
            while self.queue and sim.cluster.empty:
                gpu = sim.cluster.gpus[lowest(sim.cluster.empty)]
                sim.start(self.queue.pop(0), [gpu.whole])

    result = Simulation(SimulatedCluster.of(whole("a100-80gb"), 8), jobs, Mine(), Whole()).run()

Two runs share a slice when both are started at the same place: `Speeds.slowdown` gives the slowdown of each. A GPU is
divided by `sim.move(run, [Place(gpu, smaller slot)])` and starting the other next to it. An elastic job grows and
shrinks by `sim.move` with more or fewer places (`save` and `pause` override the cost). Reclaiming a slice for inference
is `sim.move` or `sim.preempt` of the training job and then `sim.start` at the same instant: the engine adds the wait
for the checkpoint and for the new instance.
"""
