"""Judging: metrics, features, timing, multiply-accumulates."""
