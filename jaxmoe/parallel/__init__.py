"""One layer on many devices: which mesh axes cut what, and the layer that runs cut so."""

from jaxmoe.parallel.layer import moe_parallel as moe_parallel
from jaxmoe.parallel.mesh import ParallelLayout as ParallelLayout
from jaxmoe.parallel.params import param_specs as param_specs
from jaxmoe.parallel.params import shard_params as shard_params
