"""Implementation of `jaxlowbit.llm`: model files, tokenizers, the decoder and its generation."""

from .._requirements import require, require_extra

PACKAGES = ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm")
"""The packages of the extra `llm`, in addition to Flax."""

require("flax")
require_extra("llm", *PACKAGES)
