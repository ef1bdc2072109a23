"""Runs mypyc and the C compiler in the present folder, into `lib/`: a process of its own for `tools.compile`.

python tools/mypyc_setup.py LIBRARY OPTIMIZATION PATH...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mypyc.build import mypycify
from setuptools import setup


def main(library: str, optimization: str, paths: Sequence[str]) -> None:
    """Build the extension module with all code. Those that only name a module of it are left out (`ampd.compiled`)."""
    words = ["--config-file", "mypy.ini", *paths]
    extensions = mypycify(words, opt_level=optimization, debug_level="0", group_name=library.removesuffix("__mypyc"))
    (extension,) = (each for each in extensions if each.name == library)
    # A warning of another compiler is no reason to fail. A fused multiplication and addition rounds once where Python
    # rounds twice, so results would differ on processors that have one.
    flags = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
    # Python needs one function of the library, which is visible all the same. The compiler may inline the others.
    extension.extra_compile_args = [*flags, "-ffp-contract=off", "-fvisibility=hidden"]
    setup(name=library, packages=[], ext_modules=[extension], script_args=["build_ext", "--build-lib", "lib"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
