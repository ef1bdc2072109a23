"""Looks ahead: the simulator serves the recent load again, under other roles of the workers."""
