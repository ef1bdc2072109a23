"""HTML reports: one file that needs nothing else, with tables and plots in one style."""
