"""Which devices a process uses, and how several processes form one program.

In: what the user configured, and the environment variables (`environment`, read without JAX).
Out: the devices of this process and the mesh with axes for replicas and stages (`devices`).
Rule: devices are chosen here and nowhere else. What depends on the platform asks
`devices.platform()`.
"""
