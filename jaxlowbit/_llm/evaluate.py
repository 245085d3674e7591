"""`evaluate`: perplexity, divergence, bits and memory of a model in several formats."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..quantizers import _registry
from .harness import TaskScore, evaluate_tasks
from .language_model import LanguageModel, load
from .perplexity import perplexity, windowed


class Evaluation(NamedTuple):
    """Quality and size of a model in a format.

    - `format`, `quantizer`: names, None for the weights of the file.
    - `bits`: bits per weight of all matrices, with scales and zeros.
    - `nbytes`: bytes of all weights.
    - `perplexity`, `divergence`: as in `Perplexity`; the reference is the model of the file.
    - `tokens`: the number of predicted tokens.
    - `scores`: of tasks.
    """

    format: str | None
    quantizer: str | None
    bits: float
    nbytes: int
    perplexity: float
    divergence: float
    tokens: int
    scores: tuple[TaskScore, ...] = ()

    @property
    def line(self) -> str:
        """A row of the table under `HEAD`."""
        name = "as stored" if self.format is None else self.format
        row = (
            f"{name:24}{self.quantizer or '':20}{self.bits:6.2f}{self.nbytes / 1e6:10.1f}"
            f"{self.perplexity:14,.3f}{self.divergence:12.4f}"
        )
        return "\n".join([row, *(score.line for score in self.scores)])


HEAD = f"{'format':24}{'quantizer':20}{'bits':>6}{'MB':>10}{'perplexity':>14}{'divergence':>12}"


def evaluate(
    header: Any,
    text: str | Sequence[int],
    *,
    formats: Mapping[str, Mapping[str, Any]],
    quantizers: Sequence[str | None] = (None,),
    calibration: Any = None,
    context: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    tasks: Sequence[str] = (),
    task_folder: str | None = None,
    limit: int | None = None,
    progress: bool = False,
    **decoding: Any,
) -> Iterator[Evaluation]:
    """Measures a model as stored, then in each format with each quantizer.

    **Arguments:**

    - `header`: from `open_file`.
    - `text`, `context`, `stride`: as for `perplexity`; `tokens`: their number, None for all.
    - `calibration`: as for `load`, for the quantizers that read statistics.
    - `formats`: by name, the arguments `format` and `rules` of `load`.
    - `tasks`, `task_folder`, `limit`: tasks of lm-eval, as for `evaluate_tasks`.
    - `quantizers`, `decoding`: arguments of `load`.

    **Raises:** the errors of `load` and `perplexity`.
    """
    begin, found, context = windowed(header, text, context)
    found = [*begin.tolist(), *found[: None if tokens is None else tokens + 1].tolist()]
    windows = {"context": context, "stride": stride, "progress": progress}
    reference = load(header, progress=progress, **decoding)

    def measured(model: LanguageModel, format: str | None, quantizer: str | None) -> Evaluation:
        result = _measured(model, found, format, quantizer, reference, windows)
        scores = evaluate_tasks(model, tasks, folder=task_folder, limit=limit) if tasks else []
        return result._replace(scores=tuple(scores))

    yield measured(reference, None, None)
    for format, rounding in formats.items():
        for quantizer in quantizers:
            given = calibration if reads_statistics(quantizer) else None
            options = {"quantizer": quantizer, "calibration": given, "progress": progress}
            model = load(header, **rounding, **options, **decoding)
            yield measured(model, format, quantizer)


def reads_statistics(quantizer: str | None) -> bool:
    """Whether a quantizer needs a calibration."""
    return _registry.statistics_of(quantizer) is not None


def _measured(
    model: LanguageModel,
    tokens: list[int],
    format: str | None,
    quantizer: str | None,
    reference: LanguageModel,
    options: Mapping[str, Any],
) -> Evaluation:
    found = perplexity(model, tokens, reference=reference, **options)
    matrices = [tensor for tensor in model.report.tensors if len(tensor.shape) > 1]
    count = sum(math.prod(tensor.shape) for tensor in matrices)
    bits = 8 * sum(tensor.nbytes for tensor in matrices) / count
    divergence = 0.0 if found.divergence is None else found.divergence
    size = model.report.nbytes
    return Evaluation(format, quantizer, bits, size, found.perplexity, divergence, found.tokens)
