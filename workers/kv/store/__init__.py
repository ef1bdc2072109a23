"""The directory of a KV store: where each record lies, which requests and sessions need it, and which goes first."""
