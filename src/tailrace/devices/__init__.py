"""The devices of a process, and several processes as one program.

In: the user's configuration and environment variables.
Out: the devices of this process, the mesh of replicas and stages on them, and joined processes.

    environment      TAILRACE_DEVICES and TAILRACE_CACHE, read without JAX
    devices          the choice of devices, and the mesh with axes for replicas and stages
    shardings        how a model is sharded over a mesh; shard_rules: which dims an axis divides
    peaks            their peak performance, for MFU
    surroundings     versions, flags and the kind of device: what decides a program's bits
    processes        joining, launching and leaving

Rules: devices are chosen only here, and only `configure` and `use` change the choice. Code that
depends on the platform calls `devices.platform()`, never JAX's default.
"""
