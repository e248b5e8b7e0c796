"""Where SGLang takes its configuration in each kind of process. These hooks hand it over and change nothing."""
