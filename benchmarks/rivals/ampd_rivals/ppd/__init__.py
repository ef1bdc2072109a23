"""PPD (arXiv 2603.13358): routing by a table that was fitted offline."""
