"""A plan as Kubernetes objects: the graph of `k8s/base` with the planned replicas, policies and targets."""
