"""Check a controller, a node and a login node for `migbatch doctor`. Nothing here changes anything.

A check gets facts and yields findings; `controller`, `node` and `login` read the facts of their host. Modules that run
on nodes and login nodes (see the contract `doctor-anywhere`) import only the packages installed there.
"""
