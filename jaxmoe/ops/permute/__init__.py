"""Rows into expert order and back: pre_permute and post_permute."""

from jaxmoe.ops.permute.api import permute as permute
from jaxmoe.ops.permute.api import unpermute as unpermute
from jaxmoe.ops.permute.grouping import Grouping as Grouping
from jaxmoe.ops.permute.grouping import buffer_rows as buffer_rows
from jaxmoe.ops.permute.grouping import expert_counts as expert_counts
from jaxmoe.ops.permute.grouping import group_tokens as group_tokens
from jaxmoe.ops.permute.grouping import inverse_slots as inverse_slots
from jaxmoe.ops.permute.grouping import padded_rows as padded_rows
from jaxmoe.ops.permute.slab import expand_to_masked_slab as expand_to_masked_slab
from jaxmoe.ops.permute.slab import masked_slab_to_expand as masked_slab_to_expand
from jaxmoe.ops.permute.slab import slab_grouping as slab_grouping
