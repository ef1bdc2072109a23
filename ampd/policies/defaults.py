"""The policies that decide where the user names no others: ours, in the roles that the cluster was planned with."""

BINDING = "predictive"
ROUTING = "predictive"
ORDERING = "on-time"
SLICING = "slack"
POOLS = "static"
