"""`ampd session`."""
