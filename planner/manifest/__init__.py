"""A plan as Kubernetes objects: the graph of `k8s/base` with the replicas, policies and targets that were planned."""
