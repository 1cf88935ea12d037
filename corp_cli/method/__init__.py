"""The paper: statistics, calibrate, rank, compensate; block by block, sequential."""
