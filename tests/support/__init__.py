"""What tests share: oracles, variants, fixtures."""
