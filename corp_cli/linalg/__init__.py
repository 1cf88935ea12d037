"""Pure tensor maths of the method, in float64. Imports neither timm nor the config."""
