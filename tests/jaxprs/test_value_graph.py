"""The graph of values takes as long as the program is, however its values are shared."""

import jax

from tailrace.jaxprs.value_graph import ValueGraph
from work import calls_of


def squared(times):
    def run(x):
        for _ in range(times):
            x = x * x
        return x

    return jax.make_jaxpr(run)(2.0).jaxpr.eqns


def test_a_chain_of_squares_takes_time_by_its_length():
    short, long = (squared(times) for times in (8, 16))
    assert calls_of(lambda: ValueGraph(long)) < 3 * calls_of(lambda: ValueGraph(short))
