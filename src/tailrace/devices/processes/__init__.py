"""Several processes as one program: joining, launching, leaving.

In: a coordinator's address and the number of processes, from arguments or the environment.
Out: processes that JAX has joined (`distributed`), monitored by `heartbeat`, which exchange values
(`meeting`); `launch` starts them, `introduction` reads who they are, and `rollcall` names those that do
not arrive.
Rule: code that writes files checks `distributed.writes()` first. What processes must agree on before a
dispatch is in `program/running/agreement.py`.
"""
