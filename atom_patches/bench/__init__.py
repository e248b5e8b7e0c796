"""What the benchmarks of whole features run on a device; the command line starts it in processes of its own."""
