"""How many units stay: as asked, under a budget, or from a plan."""
