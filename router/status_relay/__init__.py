"""Dynamo's frontend behind a relay that gives refusals of streams their HTTP status, and 429 its `Retry-After`."""
