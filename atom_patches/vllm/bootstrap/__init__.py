"""Where vLLM takes its configuration in each kind of process: hooks hand it over or refuse it, and change nothing."""
