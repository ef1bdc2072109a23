"""The search for the cluster's layout: an integer programme proposes layouts, simulations of the cluster decide."""
