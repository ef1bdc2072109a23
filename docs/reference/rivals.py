"""The reference of the rivals' policies: `python -m docs.reference.rivals > benchmarks/rivals/README.md`."""

from __future__ import annotations

from docs.reference.policies import rendered_kinds

_HEAD = """\
# Policies of other systems

<!-- Written by: python -m docs.reference.rivals > benchmarks/rivals/README.md -->

The package `ampd-rivals` has policies of other systems and textbook orderings, to compare AMPD with. Its entry point
registers them, so their names work in a live graph and in the simulator as those of [AMPD's own
policies](../../docs/policies.md) do. `make` installs it in a checkout. Elsewhere:

```sh
pip install benchmarks/rivals
```

Every process of a graph needs it, so an image for a cluster must hold it, too.
"""


def render() -> str:
    """The reference as Markdown."""
    return "\n".join([_HEAD, *rendered_kinds(are_rivals=True)])


if __name__ == "__main__":
    print(render(), end="")
