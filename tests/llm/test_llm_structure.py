"""A program finds its compiled version for a decoder by the identity of the decoder's structure."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from decoders import CONFIGS, random

from jaxlowbit._llm.structure import split
from jaxlowbit.llm import Decoder

TOKENS = jnp.array([[3, 1, 4, 1, 5]])


def test_decoders_that_differ_in_weights_share_a_compiled_program():
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(structure, weights):
        traced.append(structure)
        return structure.merge(weights)(TOKENS)

    def found(name):
        config = CONFIGS[name]
        decoder = Decoder(config, random(config), dtype=jnp.float32)
        return split(decoder), decoder(TOKENS)

    (structure, weights), want = found("llama")
    np.testing.assert_allclose(run(structure, weights), want, atol=1e-5)
    halves = [leaf if leaf.dtype == jnp.uint32 else leaf / 2 for leaf in weights]
    assert not jnp.allclose(run(structure, halves), want, atol=1e-3)
    (same, again), want = found("llama")
    assert same is structure
    np.testing.assert_allclose(run(same, again), want, atol=1e-5)
    assert traced == [structure]
    (other, weights), want = found("gemma3")
    assert other is not structure
    np.testing.assert_allclose(run(other, weights), want, atol=1e-5)
    assert traced == [structure, other]
