"""What a run found, as it is written and shown, and the gates that judge it."""
