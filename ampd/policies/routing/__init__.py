"""Where a round is prefilled."""
