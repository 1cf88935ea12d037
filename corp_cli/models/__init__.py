"""The only place that knows timm: loading, adapters that turn a model into Blocks, and the pruned modules."""
