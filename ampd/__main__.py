"""`python -m ampd` is the `ampd` command."""

import sys

from ampd.cli import main

sys.exit(main())
