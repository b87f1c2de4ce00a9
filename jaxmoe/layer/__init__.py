"""One MoE layer: the rooms in order, its parameters, its plan."""
