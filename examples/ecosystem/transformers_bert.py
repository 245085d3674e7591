"""transformers: BERT in Flax, with a head tied to its embeddings by `.apply`."""

import transformers_models
from transformers import BertConfig, FlaxBertForMaskedLM

config = BertConfig(**transformers_models.SIZES, max_position_embeddings=64)
transformers_models.check("BERT", FlaxBertForMaskedLM(config, seed=0))
