"""Language models saved by Orbax, restored without the original file."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from model_files import write_tiny

from jaxlowbit import quantize
from jaxlowbit.llm import Decoder, load


@pytest.mark.parametrize(("format", "dtype"), [(None, "float32"), ("mxfp4", "bfloat16")])
def test_orbax_round_trip(format, dtype, tmp_path):
    """Like docs/llm_files.md: saves the configuration, the formats and the tokenizer."""
    model_file = write_tiny(tmp_path)
    rules = {"layers.0.o": None} if format else None
    options = {"dtype": dtype, "scale_dtype": "float16", "progress": False}
    model = load(model_file, format=format, rules=rules, **options)
    formats = {tensor.name: tensor.format for tensor in model.report.tensors}
    kept = pickle.dumps((model.config, formats, model.tokenizer))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "decoder", nnx.state(model.decoder))
    model_file.unlink()

    config, formats, tokenizer = pickle.loads(kept)

    def empty(name, shape):
        if formats[name] is None:
            return jnp.zeros(shape, jnp.float32)
        return quantize(jnp.zeros(shape, jnp.float16), formats[name])

    def empty_decoder():
        weights = {name: empty(name, shape) for name, shape in config.shapes().items()}
        return Decoder(config, weights, dtype=dtype)

    decoder = nnx.eval_shape(empty_decoder)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "decoder", nnx.state(decoder))
    nnx.update(decoder, state)
    expected = nnx.state(model.decoder)
    assert jax.tree.structure(nnx.state(decoder)) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(decoder), expected)
    assert [x.dtype for x in jax.tree.leaves(state)] == [x.dtype for x in jax.tree.leaves(expected)]
    prompt = jnp.array([tokenizer.encode("hello")])
    np.testing.assert_array_equal(jax.jit(decoder)(prompt), jax.jit(model.decoder)(prompt))
