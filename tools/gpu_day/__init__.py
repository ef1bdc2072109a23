"""What only a GPU can show, as one prepared script for a machine that is there for minutes; see README.md."""
