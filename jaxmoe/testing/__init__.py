"""Oracles and hostile inputs for tests of any backend or sharding, and tests of an installation.

``pytest --pyargs jaxmoe.testing`` (with ``pip install "jaxmoe[test]"``) runs a layer in every format, layout and
backend on the devices that are there, then on several of them and in several processes, and prints what it found
(not with pytest-xdist, whose first process does not read this package).
"""

from jaxmoe.testing.oracles import (
    MARKER_WIDTH,
    calc_diff,
    dense_act,
    dense_moe,
    e4m3_codes,
    hostile_blocks,
    marker,
    marker_layer,
    random_rows,
    random_weight,
)

__all__ = [
    "MARKER_WIDTH",
    "calc_diff",
    "dense_act",
    "dense_moe",
    "e4m3_codes",
    "hostile_blocks",
    "marker",
    "marker_layer",
    "random_rows",
    "random_weight",
]
