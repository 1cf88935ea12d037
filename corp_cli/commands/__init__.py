"""The commands besides corp prune, whose run is corp_cli.pipeline: one module each, with what only it needs."""
