"""DynaServe (arXiv 2504.09285): requests that are split between two unified workers, and passes within the ITL."""
