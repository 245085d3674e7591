"""What `jaxlowbit.nnx` and `jaxlowbit.linen` are made of; `rules` and `report` serve both."""
