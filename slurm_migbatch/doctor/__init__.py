"""What `migbatch doctor` looks at on a controller, a node and a login node. Nothing here changes anything.

A check gets facts and yields findings; `controller`, `node` and `login` read the facts of their host. What nodes and
login nodes run (see the contract `doctor-anywhere`) imports no more than these have.
"""
