"""The keys of `tr.key()` by the book, for plain programs."""

import jax


def key_of(step, microbatch=0, replica=0, call=0, seed=0):
    """Folded from seed, step, microbatch, replica and call number."""
    key = jax.random.key(seed)
    for number in (step, microbatch, replica, call):
        key = jax.random.fold_in(key, number)
    return key
