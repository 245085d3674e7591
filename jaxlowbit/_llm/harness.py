"""Tasks of EleutherAI's lm-evaluation-harness, such as the accuracy on multiple-choice questions.

Source: https://github.com/EleutherAI/lm-evaluation-harness, `docs/model_guide.md`.
"""

import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._requirements import require_extra
from .generate import generate
from .language_model import LanguageModel, check_model
from .perplexity import perplexity
from .structure import Structure, split

_ROWS = 64  # maximum number of tokens whose logits exist at the same time
_LENGTH = 64  # windows are padded to a multiple of it


class TaskScore(NamedTuple):
    """A metric of a task, such as `acc`, and its standard error, or None."""

    task: str
    metric: str
    value: float
    error: float | None

    @property
    def line(self) -> str:
        """The score in words."""
        error = "" if self.error is None else f" +- {self.error:.4f}"
        return f"  {self.task}: {self.metric} {self.value:.4f}{error}"


def harness_model(model: LanguageModel) -> Any:
    """Makes an `lm_eval.api.model.LM` of a model, for `lm_eval.simple_evaluate(model=...)`.

    **Raises:** `TypeError` for another object, `ValueError` for a model without a tokenizer,
    `ModuleNotFoundError` without lm-eval.

    ```py
    found = lm_eval.simple_evaluate(model=harness_model(model), tasks=["hellaswag"], limit=100)
    ```
    """
    check_model("harness_model", model)
    if model.tokenizer is None:
        raise ValueError(
            "harness_model: the model has no tokenizer, but tasks are texts; load a model with one."
        )
    base = _package().api.model.LM
    return types.new_class("HarnessModel", (_Requests, base))(model)


def evaluate_tasks(
    model: LanguageModel,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    limit: int | None = None,
) -> list[TaskScore]:
    """Measures a model on tasks of lm-eval.

    **Arguments:**

    - `tasks`: names of tasks of lm-eval.
    - `folder`: None, or a folder with more tasks, YAML files of lm-eval.
    - `limit`: maximum number of documents of each task, None for all.

    **Raises:** as `harness_model` does, and what lm-eval raises.
    """
    lm_eval = _package()
    manager = lm_eval.tasks.TaskManager(include_path=folder)
    options = {"limit": limit, "bootstrap_iters": 0, "task_manager": manager}
    found = lm_eval.simple_evaluate(model=harness_model(model), tasks=list(tasks), **options)
    scores = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, _, rest = key.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{rest}")
                known = float(error) if isinstance(error, int | float) else None
                scores.append(TaskScore(task, metric, value, known))
    return scores


def _package() -> Any:
    require_extra("llm-eval", "lm_eval")
    import lm_eval.api.model  # pyright: ignore[reportMissingImports]
    import lm_eval.tasks  # pyright: ignore[reportMissingImports]

    return lm_eval


class _Requests:
    """The requests of lm-eval: `args` of each are its operands."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self._parts = split(model.decoder)

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """log p of a continuation after a context, and whether each token has the largest logit."""
        return [self._score(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """log p of a text, in windows of the context, without its first token."""
        context = self.model.config.context
        found = [perplexity(self.model, x.args[0], context=context) for x in requests]
        return [-x.loss * x.tokens for x in found]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """The text after a context, up to one of the texts that end it."""
        texts = []
        for request in requests:
            context, given = request.args
            known = {"until", "max_gen_toks", "do_sample", "temperature"}
            if unknown := set(given) - known:
                raise ValueError(
                    f"harness_model: the task sets {sorted(unknown)} for generation, but "
                    f"{sorted(known)} are supported; choose another task."
                )
            until = given.get("until") or ()
            options = {
                "stop": [until] if isinstance(until, str) else list(until),
                "max_new_tokens": given.get("max_gen_toks", 256),
                "temperature": given.get("temperature", 0.0) if given.get("do_sample") else 0.0,
            }
            room = self.model.config.context - options["max_new_tokens"]
            prompt = self._encoded(context)[-max(room, 1) :]
            texts.append(generate(self.model, prompt, **options).text)
        return texts

    def _encoded(self, text: str) -> list[int]:
        """The tokens of a text; of an empty one, a token that begins or ends texts."""
        tokenizer: Any = self.model.tokenizer
        found = [*tokenizer.leading, *(tokenizer.encode(text, bos=False) if text else [])]
        if found:
            return found
        return [tokenizer.bos if tokenizer.bos is not None else tokenizer.eos[0]]

    def _score(self, context: str, continuation: str) -> tuple[float, bool]:
        # The joined text is encoded; spaces between context and continuation are scored.
        before = self._encoded(context.rstrip())
        if context.strip():
            whole = self._encoded(context + continuation)
        else:
            tokenizer: Any = self.model.tokenizer
            whole = [*before, *tokenizer.encode(context + continuation, bos=False)]
        count = max(len(whole) - len(before), 1)
        whole = whole[-(self.model.config.context + 1) :]
        return self._likelihood(whole, min(count, len(whole) - 1))

    def _likelihood(self, tokens: Sequence[int], count: int) -> tuple[float, bool]:
        """log p of the last `count` tokens, and whether each has the largest logit."""
        length = min(-(-(len(tokens) - 1) // _LENGTH) * _LENGTH, self.model.config.context)
        padded = np.zeros(length + 1, np.int32)
        padded[: len(tokens)] = tokens
        bounds = np.int32(len(tokens) - 1 - count), np.int32(len(tokens) - 1)
        total, greedy = _likelihood(*self._parts, padded, *bounds)
        return float(total), bool(greedy)


@functools.partial(jax.jit, static_argnums=0)
def _likelihood(
    structure: Structure, weights: list[Array], tokens: Array, skipped: Array, count: Array
) -> tuple[Array, Array]:
    """The sum of log p of the `count` tokens after the first, except the first `skipped` of these,
    and whether each has the largest logit. `tokens` is (length + 1,)."""
    decoder = structure.merge(weights)
    length = len(tokens) - 1
    steps = jnp.arange(length, dtype=jnp.int32)
    positions = jnp.where(steps < count, steps, -1)
    cache = decoder.make_cache(1, length)
    features = decoder.forward(tokens[None, :-1], positions[None], cache)[0][0]

    def of_row(row: tuple[Array, Array]) -> tuple[Array, Array]:
        found = jax.nn.log_softmax(decoder.logits(row[0]))
        return found[row[1]], jnp.argmax(found) == row[1]

    chosen, best = lax.map(of_row, (features, tokens[1:]), batch_size=min(_ROWS, length))
    scored = (steps >= skipped) & (steps < count)
    return jnp.sum(jnp.where(scored, chosen, 0)), jnp.all(best | ~scored)
