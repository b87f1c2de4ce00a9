"""Even load on experts: measuring it, training for it, and placing copies of experts where it is not."""

from jaxmoe.balance.load import expert_load, moe_with_load
from jaxmoe.balance.losses import load_balancing_loss, router_z_loss, update_correction_bias
from jaxmoe.balance.picture import load_bars, plot_load
from jaxmoe.balance.place import place_experts
from jaxmoe.balance.placement import Placement, plan_placements

__all__ = [
    "Placement",
    "expert_load",
    "load_balancing_loss",
    "load_bars",
    "moe_with_load",
    "place_experts",
    "plan_placements",
    "plot_load",
    "router_z_loss",
    "update_correction_bias",
]
