"""Operations of the original, by the modules they were in.

In: values of a program that is being traced. Out: values of the same program.
Rule: one file for one module of the original, with its name; what they need of variables and replicas
is in `graph`.
"""

from tailrace.compat.ipu.ops import all_to_all_op as all_to_all_op
from tailrace.compat.ipu.ops import control_flow_ops as control_flow_ops
from tailrace.compat.ipu.ops import cross_replica_ops as cross_replica_ops
from tailrace.compat.ipu.ops import embedding_ops as embedding_ops
from tailrace.compat.ipu.ops import functional_ops as functional_ops
from tailrace.compat.ipu.ops import grad_util_ops as grad_util_ops
from tailrace.compat.ipu.ops import internal_ops as internal_ops
from tailrace.compat.ipu.ops import math_ops as math_ops
from tailrace.compat.ipu.ops import nn_ops as nn_ops
from tailrace.compat.ipu.ops import pipelining_ops as pipelining_ops
from tailrace.compat.ipu.ops import rand_ops as rand_ops
from tailrace.compat.ipu.ops import reduce_scatter_op as reduce_scatter_op
from tailrace.compat.ipu.ops import replication_ops as replication_ops
from tailrace.compat.originals.missing import missing_from

__getattr__, __dir__ = missing_from(__name__)
