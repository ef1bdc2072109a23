"""The Kubernetes manifests of the graph, installed with it: `importlib.resources.files("k8s")` is their folder."""
