"""`python -m ampd` is the `ampd` command."""

import sys

from ampd.cli.main import main

sys.exit(main())
