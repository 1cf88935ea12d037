"""The modules that take the place of timm's attention."""
