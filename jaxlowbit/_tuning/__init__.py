"""What `jaxlowbit.tune` is made of: `weights` says what to measure, `measure` does."""
