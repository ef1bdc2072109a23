"""The command line: `ampd COMMAND`. The only package that may import every other one."""
