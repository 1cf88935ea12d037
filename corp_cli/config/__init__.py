"""The schema of `configs/`: typed dataclasses with range checks. Imports neither torch nor Hydra."""
