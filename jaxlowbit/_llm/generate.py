"""`generate` and `stream`: from prompts and options to texts."""

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from .._core import checks
from . import programs
from .language_model import LanguageModel, check_model
from .programs import Drawn, Kept
from .prompts import Prompt, batch, is_single
from .sampling import SEED_RULE, Sampling
from .schema import Schema
from .text import Text


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities, from the logits of the model before penalties,
    temperature, `top_k`, `top_p` and `min_p`.

    - `chosen`: for each token of the generation.
    - `top`: for each of these, the tokens with the highest log-probabilities, in descending order.
    """

    chosen: list[float]
    top: list[dict[int, float]]


class Generation(NamedTuple):
    """The tokens and the text that follow one prompt.

    - `text`: None without a tokenizer; truncated before a stop string.
    - `tokens`: without the token that ends a turn.
    - `prompt_tokens`: the number of tokens of the prompt.
    - `finish`: `"eos"`; `"stop"`; `"length"` if it reached `max_new_tokens` or the end of the
      context; `"nan"` if the logits of the next token contain NaN.
    - `tokens_per_second`: for the whole batch, after the prompts were read.
    - `logprobs`: a `Logprobs`, or None unless requested.
    """

    text: str | None
    tokens: list[int]
    prompt_tokens: int
    finish: str
    tokens_per_second: float
    logprobs: Logprobs | None = None


def generate(
    model: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    n: int = 1,
    logprobs: int | None = None,
    schema: Mapping[str, Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Any:
    """Generates text after a prompt, or after each prompt of a batch.

    The logits of a token are processed in this order: `repetition_penalty`, `frequency_penalty`,
    `presence_penalty`, `temperature`, `top_k`, `top_p`, `min_p`, sampling. With `temperature=0`,
    only the penalties apply.

    **Arguments:**

    - `model`: from `load` or `init`.
    - `prompt`: a string, which is encoded unchanged; a chat, a list of messages `{"role": "user",
      "content": text}`, which is rendered with the template of the model; or tokens. A list of
      these is a batch; prompts may differ in length.
    - `max_new_tokens`: maximum number of generated tokens; the end of the context also ends it.
    - `temperature`: 0 selects the token with the largest logit (greedy); above 0, tokens are
      sampled from the softmax of the logits divided by it.
    - `top_k`, `top_p`: sample from the k tokens with the largest logits, and from the smallest set
      of top tokens whose probabilities reach p; None for all.
    - `min_p`: sample from tokens with at least this fraction of the largest probability; None or 0
      for all.
    - `repetition_penalty`: divides the positive logits of tokens in the prompt or the generated
      text, and multiplies the negative ones; None or 1 for none.
    - `frequency_penalty`, `presence_penalty`: subtracted from the logit of a generated token, once
      for each occurrence, and once; None or 0 for none. Tokens of the prompt do not count.
    - `seed`: a 64-bit integer. Equal seeds give equal samples for a sequence of the batch and a
      position.
    - `stop`: texts that end a generation, and are not part of it.
    - `n`: the number of texts for each prompt, which is read once. Above 1, the result has a list
      of `n` instead of each `Generation`, and `temperature` must be above 0.
    - `logprobs`: for `Generation.logprobs`: the number of top tokens to report for each token; 0
      reports only the chosen token's log-probability, None nothing.
    - `schema`: None, or a JSON schema as a mapping: the text is JSON of this form, if it ends
      before `max_new_tokens`. Tokens are sampled one by one, and `logprobs` refer to the
      allowed tokens. Needs the extra `llm-json`, and the tokenizer of a loaded model.
    - `template_options`: variables for the template of a chat, such as
      `{"enable_thinking": False}`.

    **Returns:** a `Generation`; for a batch, a list of them.

    **Raises:** `TypeError` for arguments of other types; `ValueError` for an empty prompt, a prompt
    that fills the context, tokens outside the vocabulary, options out of range, and a batch whose
    cache exceeds the memory, with the bytes that it needs.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    generate(model, [[3, 1, 4], [1, 5, 9, 2]], max_new_tokens=4, temperature=0.7, seed=1)
    found = generate(model, [3, 1, 4], temperature=1.0, n=3, logprobs=2, max_new_tokens=4)
    best = max(found, key=lambda x: sum(x.logprobs.chosen))
    ```
    """
    check_model("generate", model)
    return generated(
        Request.of(
            "generate",
            model,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=stop,
            n=n,
            logprobs=logprobs,
            schema=schema,
            template_options=template_options,
        ),
        prompt,
    )


def stream(
    model: LanguageModel,
    prompt: Prompt,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
    schema: Mapping[str, Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Generator[Any, None, Generation]:
    """Generates like `generate` after one prompt, and yields the text as it is generated.

    Tokens come in groups that grow from 1 to 32, on a GPU in groups of 8. Text that may become a
    stop string, and incomplete characters, are delayed. Closing the iterator ends the generation.

    **Returns:** a generator of strings, or of lists of tokens without a tokenizer. It returns the
    `Generation` (`result = yield from stream(...)`).

    **Raises:** the errors of `generate`, and `ValueError` for a batch.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    for tokens in stream(model, [3, 1, 4], max_new_tokens=4):
        print(tokens)
    ```
    """
    check_model("stream", model)
    return streamed(
        Request.of(
            "stream",
            model,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=stop,
            logprobs=logprobs,
            schema=schema,
            template_options=template_options,
        ),
        prompt,
    )


class Request(NamedTuple):
    """The options of a call, checked."""

    caller: str
    model: LanguageModel
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...]
    n: int
    logprobs: int | None
    template_options: Mapping[str, Any] | None
    schema: Schema | None

    @classmethod
    def of(
        cls,
        caller: str,
        model: Any,
        *,
        max_new_tokens: Any,
        seed: Any,
        stop: Any,
        logprobs: Any,
        template_options: Any,
        n: Any = 1,
        schema: Any = None,
        **sampling: Any,
    ) -> "Request":
        """`model` may be the header of a file, to check options before weights are read.

        **Raises:** `TypeError` and `ValueError` for invalid options.
        """
        rule = "the number of tokens to generate at most, an integer from 1 on"
        max_new_tokens = checks.integer(caller, "max_new_tokens", max_new_tokens, rule)
        drawing = Sampling.of(caller, **sampling)
        seed = checks.integer(caller, "seed", seed, SEED_RULE, least=-(2**63), most=2**63 - 1)
        n = checks.integer(caller, "n", n, "the number of texts for each prompt, from 1 on")
        if n > 1 and drawing.temperature is None:
            raise ValueError(
                f"{caller}: n is {n}, but without a temperature all of them would be the same; set "
                "temperature, such as 0.8."
            )
        if logprobs is not None:
            most = model.config.vocabulary
            rule = f"a number of most likely tokens, from 0 to {most}, or None"
            logprobs = checks.integer(caller, "logprobs", logprobs, rule, least=0, most=most)
        if template_options is not None and not isinstance(template_options, Mapping):
            raise TypeError(
                f"{caller}: template_options is {checks.brief(template_options)}, but it must be a "
                'mapping from names of variables to values, such as {"enable_thinking": False}.'
            )
        stops = _stops(caller, model, stop)
        found = None if schema is None else Schema.of(caller, model, schema)
        others = n, logprobs, template_options, found
        return cls(caller, model, max_new_tokens, drawing, seed, stops, *others)

    def encoded(self, prompts: Any) -> list[list[int]]:
        return batch(self.caller, self.model, prompts, self.template_options)


def _stops(caller: str, model: LanguageModel, stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(x, str) for x in stops):
        raise TypeError(
            f"{caller}: stop is {checks.brief(stop)}, but it must be a text, or a list of texts, "
            "that end a generation."
        )
    if stops and model.tokenizer is None:
        raise ValueError(
            f"{caller}: stop is text, but the model has no tokenizer; look for its tokens in the "
            "result."
        )
    if "" in stops:
        raise ValueError(f"{caller}: a stop string is empty; it would stop everything.")
    return tuple(stops)


def generated(request: Request, prompt: Any, kept: Kept | None = None) -> Any:
    """The result of `generate`; `kept` may contain the beginning of a single prompt."""
    single = is_single(request.caller, prompt)
    prompts = request.encoded([prompt] if single else prompt)
    generation, rows, n = _generation(request, prompts, kept), [], request.n
    while not rows:
        try:
            next(generation)
        except StopIteration as end:
            rows = end.value
    found = rows if n == 1 else [rows[i : i + n] for i in range(0, len(rows), n)]
    return found[0] if single else found


def streamed(
    request: Request, prompt: Any, kept: Kept | None = None
) -> Generator[Any, None, Generation]:
    """Checks the prompt, then returns the generator of `stream`."""
    if not is_single(request.caller, prompt):
        raise ValueError(
            f"{request.caller}: the prompt is a batch, but text comes of one; use generate."
        )
    return _pieces(_generation(request, request.encoded([prompt]), kept, growing=True))


def _pieces(
    generation: Generator[list[Text], None, list[Generation]],
) -> Generator[Any, None, Generation]:
    text = None
    with contextlib.closing(generation):
        while True:
            try:
                (text,) = next(generation)
            except StopIteration as end:
                if text and (new := text.take()):
                    yield new
                return end.value[0]
            if new := text.take():
                yield new


def _generation(
    request: Request, prompts: list[list[int]], kept: Kept | None, *, growing: bool = False
) -> Generator[list[Text], None, list[Generation]]:
    """Yields the texts, which grow, after every group of tokens; returns the results."""
    model, n = request.model, request.n
    rows = [
        _Row(len(prompt), Text(model.tokenizer, model.config.eos, request.stops), [], [])
        for prompt in prompts
        for _ in range(n)
    ]
    texts = [row.text for row in rows]
    groups = programs.run(
        model,
        prompts,
        request.max_new_tokens,
        request.sampling,
        request.seed,
        n=n,
        logprobs=request.logprobs,
        masks=None if request.schema is None else request.schema.masks(len(rows)),
        kept=kept,
        growing=growing,
        caller=request.caller,
    )
    next(groups)  # the prompts are read
    start = time.perf_counter()
    for drawn in groups:
        for i, row in enumerate(rows):
            row.add(drawn, i)
        yield texts
        if all(text.finish for text in texts):
            break
    rate = sum(len(text.tokens) for text in texts) / (time.perf_counter() - start)
    for text in texts:
        text.close("length")
    with_logprobs = request.logprobs is not None
    return [row.result(rate, with_logprobs) for row in rows]


class _Row(NamedTuple):
    """A sequence of the batch."""

    prompt_tokens: int
    text: Text
    chosen: list[float]
    top: list[dict[int, float]]

    def add(self, drawn: Drawn, i: int) -> None:
        """Appends the tokens of sequence i up to its end."""
        tokens = drawn.tokens[i].tolist()
        count = next((at for at, token in enumerate(tokens) if token < 0), len(tokens))
        self.text.add(tokens[:count])
        if drawn.logprobs is not None:
            self.chosen.extend(drawn.logprobs[i, :count].tolist())
            pairs = zip(drawn.top_tokens[i, :count], drawn.top_logprobs[i, :count], strict=True)
            self.top.extend(
                dict(zip(names.tolist(), values.tolist(), strict=True)) for names, values in pairs
            )
        if count < len(tokens):
            self.text.close(programs.FINISHES[tokens[count]])

    def result(self, rate: float, with_logprobs: bool) -> Generation:
        text, count = self.text, len(self.text.tokens)
        logprobs = Logprobs(self.chosen[:count], self.top[:count]) if with_logprobs else None
        finish = text.finish or ""
        return Generation(text.text, text.tokens, self.prompt_tokens, finish, rate, logprobs)
