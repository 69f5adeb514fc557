"""The devices of a process, and several processes as one program.

In: the user's configuration and environment variables (`environment`, read without JAX).
Out: the devices of this process, and the mesh with axes for replicas and stages (`devices`); their peak
performance (`peaks`); joined processes (`processes`).
Rule: devices are chosen only here. Code that depends on the platform calls `devices.platform()`.
"""
