"""The router room: token rows to expert ids and final weights."""

from jaxmoe.router.checks import check_replicas, check_routing
from jaxmoe.router.copies import choose_copies
from jaxmoe.router.hash import check_table
from jaxmoe.router.route import route, router_logits
from jaxmoe.router.routing import Routing, append_shared_slots

__all__ = [
    "Routing",
    "append_shared_slots",
    "check_replicas",
    "check_routing",
    "check_table",
    "choose_copies",
    "route",
    "router_logits",
]
