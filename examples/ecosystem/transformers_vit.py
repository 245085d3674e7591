"""transformers: ViT in Flax. Its patches go through a convolution, which stays in floats."""

import jax
import transformers_models
from transformers import FlaxViTForImageClassification, ViTConfig

# Two logits, as by default, would be too few numbers to compare.
config = ViTConfig(**transformers_models.SIZES, image_size=32, patch_size=8, num_labels=100)
images = jax.random.normal(jax.random.key(1), (2, 3, 32, 32))
transformers_models.check("ViT", FlaxViTForImageClassification(config, seed=0), images)
