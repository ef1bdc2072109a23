"""Before deployment: the profiler, the simulator and the search for the cluster's layout."""
