"""argv → Hydra → command. Imports no torch."""
