"""Everything that is written or read back whole."""
