"""HTML reports: one file that needs nothing else, with tables and plots in one style."""

import logging

# Where HOME cannot be written, matplotlib warns that it makes a temporary folder for its cache. That helps no reader of
# a report, and it comes at the import.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
