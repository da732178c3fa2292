"""A simulated Slurm and simulated nodes on which migbatchd's own parts run as on the real ones.

`SimulatedSlurm` (client.py) is a `SlurmClient`; it keeps the contract of `tests/support/contract.py` that real Slurm
keeps. `SimulatedNodes` (nodes.py) take published plans, choose slots as the Prolog does and tell the same events.
`run.py` drives both through a workload, `controller.py` is the controller that migbatchd would be to them, with a
record (`record.py`) and a submit filter (`filter.py`). `tracejobs.py` and `booking.py` play traces of `lab.sim` on it.
"""
