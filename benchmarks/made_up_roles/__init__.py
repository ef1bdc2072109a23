"""Ways to choose roles, on sessions that a script makes up: kinds of agents that no policy was made with."""
