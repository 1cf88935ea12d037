"""Which images, their classes, their pixels, batches."""
