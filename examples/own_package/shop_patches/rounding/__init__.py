"""Sums that can be paid in coins."""
