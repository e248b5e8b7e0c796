"""SGLang's own kernels behind the operations of `atom_patches.kernels`: the provider `engine`, one module a family."""
