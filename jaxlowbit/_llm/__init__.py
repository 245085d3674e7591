"""What `jaxlowbit.llm` is made of: model files, tokenizers, the decoder and its generation."""

from .._requirements import require

require("flax")
