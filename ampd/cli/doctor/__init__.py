"""`ampd doctor`: whether this machine can run a graph, and how well."""
