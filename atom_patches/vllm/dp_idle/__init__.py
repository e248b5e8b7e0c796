"""A data-parallel rank without scheduled tokens runs a dummy pass, so that its peers do not wait for it."""
