"""Simulate Slurm and nodes; migbatchd's own code runs on them as on real ones.

`SimulatedSlurm` (client.py) is a `SlurmClient`; it passes the contract of `tests/support/contract.py` like real
Slurm. `SimulatedNodes` (nodes.py) apply published plans, choose slots like the Prolog and send the same events;
`SimulatedProcesses` (processes.py) run the jobs on them.
`run.py` runs a workload on these, `controller.py` runs migbatchd's controller, with a record (`record.py`) and a submit
filter (`filter.py`). `tracejobs.py` and `booking.py` run traces of `lab.sim` on the simulated Slurm.
"""
