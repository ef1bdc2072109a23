"""`ampd serve`: the whole graph on one machine, supervised."""
