"""Dynamo's frontend behind a relay that adds `Retry-After`, names sessions, and bounds what a client may send."""
