"""Ours from an even split against rivals, and against our own parts, each on the best layout that a search finds."""
