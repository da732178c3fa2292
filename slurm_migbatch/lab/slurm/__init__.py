"""Simulate Slurm and nodes, on which migbatchd's own parts run as on real ones.

`SimulatedSlurm` (client.py) is a `SlurmClient`; it passes the contract of `tests/support/contract.py` like real
Slurm. `SimulatedNodes` (nodes.py) apply published plans, choose slots like the Prolog and send the same events.
`run.py` drives both through a workload, `controller.py` is migbatchd's controller for them, with a
record (`record.py`) and a submit filter (`filter.py`). `tracejobs.py` and `booking.py` run traces of `lab.sim` on it.
"""
