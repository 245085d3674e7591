"""MaxText: its Llama 2 decoder in NNX, with its `DenseGeneral` and `Embed`."""

from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import maxtext
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.models import models
from maxtext.utils import maxtext_utils

from jaxlowbit import INT8
from jaxlowbit.nnx import quantize_model

OPTIONS = {
    "run_name": "tiny",
    "decoder_block": "llama2",
    "base_emb_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 64,
    "base_mlp_dim": 512,
    "base_num_decoder_layers": 2,
    "vocab_size": common.VOCABULARY,
    "max_target_length": common.LENGTH,
    "per_device_batch_size": common.SEQUENCES,
    "dtype": "float32",
    "weight_dtype": "float32",
    "attention": "dot_product",
    "scan_layers": "false",
    "enable_checkpointing": "false",
    "skip_jax_distributed_system": "true",
    "log_config": "false",
}


@nnx.jit
def logits(model: Any) -> jax.Array:
    segments = jnp.ones_like(common.IDS)
    return model(common.IDS, common.POSITIONS, segments, enable_dropout=False)


base = Path(maxtext.__path__[0]) / "configs" / "base.yml"
config = pyconfig.initialize(["", str(base), *(f"{name}={x}" for name, x in OPTIONS.items())])
mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
with mesh:
    model = models.Transformer(config, mesh, quant=None, rngs=nnx.Rngs(0))
    wanted = logits(model)
    # A single INT8 would keep embeddings and heads in floats; this rule matches them too.
    report = quantize_model(model, {"": INT8})
    common.check("maxtext", "Llama 2", logits(model), wanted, report.coverage)
