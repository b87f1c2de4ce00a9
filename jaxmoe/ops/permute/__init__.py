"""Rows into expert order and back: pre_permute and post_permute."""

from jaxmoe.ops.permute.api import Grouping as Grouping
from jaxmoe.ops.permute.api import buffer_rows as buffer_rows
from jaxmoe.ops.permute.api import expert_counts as expert_counts
from jaxmoe.ops.permute.api import group_tokens as group_tokens
from jaxmoe.ops.permute.api import inverse_slots as inverse_slots
from jaxmoe.ops.permute.api import padded_rows as padded_rows
from jaxmoe.ops.permute.api import permute as permute
from jaxmoe.ops.permute.api import unpermute as unpermute
