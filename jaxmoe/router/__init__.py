"""The router room: token rows to expert ids and final weights."""

from jaxmoe.router.checks import check_routing
from jaxmoe.router.hash import check_table
from jaxmoe.router.route import route
from jaxmoe.router.routing import Routing, append_shared_slots

__all__ = ["Routing", "append_shared_slots", "check_routing", "check_table", "route"]
