"""What every room uses: trees, checks of arguments, files, notes, spans, seams.

    trees        flattening and rebuilding elements, and naming their leaves
    array_like   names for what users give where an array, a dtype or a shape is expected
    checks       checks of arguments: numbers, flags, names of a choice
    paths        checks of arguments that are paths
    files        reading untrusted files, and writing files atomically
    messages     notes that are logged once, and pieces of sentences
    spans        spans, counters and the names of our own scopes: instrumentation
    seams        what we rely on in other packages beyond their documentation, with probes

Rule: nothing here imports JAX. Data can be inspected and benchmarked without starting it, which is why
`trees` exists in addition to `jax.tree`. Exceptions are in `tailrace.errors`, which users import.
"""
