"""The table of clients and features: the real packages against a graph that runs on this machine."""
