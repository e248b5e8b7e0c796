"""Where configurations are handed over."""
