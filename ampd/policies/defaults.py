"""The policies that decide where the user names no others: ours, in the roles that the cluster was planned with."""

from ampd.types import Moves

BINDING = "predictive"
ROUTING = "predictive"
ORDERING = "on-time"
SLICING = "slack"
POOLS = "static"
MOVES: Moves = "needed"
"""Sessions that stayed with a new prefill worker would be slowed down by its prefills, and would slow them down. Those
that stayed with a full memory would evict others."""
