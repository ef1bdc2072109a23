"""Dynamo's frontend behind a relay that mends requests and answers, names sessions, and bounds what clients send."""
