"""The policies that decide where nobody says otherwise: ours, in the roles that the cluster was planned with."""

BINDING = "least-kv"
ROUTING = "predictive"
ORDERING = "on-time"
SLICING = "slack"
POOLS = "static"
