"""What a run has around it: console, memory, environment, other processes."""
