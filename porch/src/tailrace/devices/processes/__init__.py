"""Several processes as one program: joining, launching, leaving.

In: a coordinator's address and the number of processes, from arguments or the environment.
Out: processes that JAX has joined (`distributed`), watched by `heartbeat`; `launch` starts them.
Rule: whoever writes files asks `distributed.writes()` first. What processes must agree on before a
dispatch is in `program/running/agreement.py`.
"""
