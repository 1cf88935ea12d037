"""What later runs, and runs that go on, need not do again: statistics, curves, blocks."""
