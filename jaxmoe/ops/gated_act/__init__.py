"""The gated activation between the two expert projections."""

from jaxmoe.ops.gated_act.api import BACKENDS as BACKENDS
from jaxmoe.ops.gated_act.api import gated_act as gated_act
