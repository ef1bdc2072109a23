"""Ways to choose the workers' roles, from an even split: what each attains at fixed rates."""
