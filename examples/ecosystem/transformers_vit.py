"""transformers: ViT in Flax. The convolution of its patches stays in floats."""

import jax
import transformers_models
from transformers import FlaxViTForImageClassification, ViTConfig

# The default of two logits is too few to compare.
config = ViTConfig(**transformers_models.SIZES, image_size=32, patch_size=8, num_labels=100)
images = jax.random.normal(jax.random.key(1), (2, 3, 32, 32))
transformers_models.check("ViT", FlaxViTForImageClassification(config, seed=0), images)
