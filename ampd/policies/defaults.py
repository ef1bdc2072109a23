"""The policies that decide where the user names no others: ours, in roles that follow the load."""

from ampd.types import Moves

BINDING = "predictive"
ROUTING = "predictive"
ORDERING = "on-time"
SLICING = "slack"
POOLS = "predictive"
MOVES: Moves = "needed"
"""Sessions that stayed with a new prefill worker would be slowed down by its prefills, and would slow them down. Those
that stayed with a full memory would evict others."""
