"""What a run works on: the dense model, the groups to prune, and the images. Checked before any long work."""
