"""The profiler: measures an engine over a grid of points and fits the performance model to them."""
