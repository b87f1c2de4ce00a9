"""One layer on many devices: which mesh axes cut what, and the layer that runs cut so."""

from jaxmoe.dispatch.all_to_all import AllToAll
from jaxmoe.dispatch.deepep import DeepEP, EpContext
from jaxmoe.parallel.layer import moe_parallel
from jaxmoe.parallel.mesh import ParallelLayout
from jaxmoe.parallel.params import param_specs, shard_params

__all__ = ["AllToAll", "DeepEP", "EpContext", "ParallelLayout", "moe_parallel", "param_specs", "shard_params"]
