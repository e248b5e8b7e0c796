"""What one engine step needs, framework-neutral and torch-only."""
