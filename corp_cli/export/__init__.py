"""The checkpoint, and files for other runtimes with their parity."""
