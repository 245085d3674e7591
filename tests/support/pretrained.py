"""A model that contains a module and its parameters, like the Flax models of transformers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

WIDTH, VOCABULARY = 64, 128
IDS = jnp.array([[1, 5, 2], [7, 0, 127]])


class Tied(nn.Module):
    """A head that uses `.apply`, like GPT-2, OPT and BERT in transformers."""

    def setup(self) -> None:
        self.embed, self.up = nn.Embed(VOCABULARY, WIDTH), nn.Dense(WIDTH)
        self.head = nn.Dense(VOCABULARY, use_bias=False)

    def __call__(self, ids: Any, plain: bool = False) -> Any:
        x = self.up(self.embed(ids))
        if plain:
            return self.embed.attend(x)
        table = self.embed.variables["params"]["embedding"]
        return self.head.apply({"params": {"kernel": table.T}}, x)


class Pretrained:
    """Like `FlaxPreTrainedModel`."""

    def __init__(self) -> None:
        self._module = Tied()
        self._params = self._module.init(jax.random.key(0), IDS)["params"]
        self._required_params = set(traverse_util.flatten_dict(self._params))

    @property
    def module(self) -> Any:
        return self._module

    @property
    def params(self) -> Any:
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        assert self._required_params <= set(traverse_util.flatten_dict(params))
        self._params = params

    def __call__(self, ids: Any, params: Any = None, train: bool = False) -> Any:
        variables = {"params": params or self.params}
        return self.module.apply(variables, ids, False, rngs={}, mutable=False)
