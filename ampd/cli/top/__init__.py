"""`ampd top`: a live view of a running graph, from its shared state alone."""
