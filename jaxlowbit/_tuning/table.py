"""Tables of measured choices: reads and writes files, and passes tables to the kernels.

Tables are read when the package is imported, before any device is known, so they are compared with
the information of the driver; the kernels look up the name of their device.
"""

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from .._backends import selection
from .._backends.selection import Choice, DeviceFacts, Product
from .._core.format import format_name, parse_format
from .._core.layout import blocks
from .._version import __version__

VARIABLE = "JAXLOWBIT_TUNED"
LHS = ("bfloat16", "float16")  # dtypes with choices to measure
_DRIVER = Path("/proc/driver/nvidia")
_SHIPPED = Path(__file__).parent / "tables"


class Entry(NamedTuple):
    product: Product
    choice: Choice
    us: float
    default: Choice  # the choice without measurements
    default_us: float
    min_m: int = 1  # minimum M of the choice


class Table(NamedTuple):
    """Entries, and the device and versions that they are valid for."""

    device: DeviceFacts
    driver: str | None
    jaxlowbit: str
    entries: tuple[Entry, ...]


def load() -> None:
    """Passes the available tables to the kernels; warns of tables that do not match.

    The user's measurements of a weight override the package's.
    """
    found = {table.device.name: table for table in map(read, shipped())}
    for path in files():
        try:
            table = read(path)
        except (OSError, ValueError) as error:
            _warn_unused(path, getattr(error, "strerror", None) or str(error))
            continue
        if reason := misfit(table):
            # Machines with other GPUs may share the cache.
            if VARIABLE in os.environ or _is_here(table.device):
                _warn_unused(path, reason)
            continue
        if refused := _set(table):
            _warn(f"{len(refused)} choices of {path} are not used, the first because {refused[0]}.")
        found[table.device.name] = _merged(found.get(table.device.name), table)
    for table in found.values():
        _set(table)


def shipped() -> list[Path]:
    """Paths of the package's tables; empty if tables are turned off."""
    if os.environ.get(VARIABLE) == "":
        return []
    return sorted(_SHIPPED.glob("*.json"))


def _merged(others: Table | None, table: Table) -> Table:
    """A table, extended by another table of its device for other weights."""

    def kind(entry: Entry) -> Product:
        n, k = blocks(entry.product.n), blocks(entry.product.k)
        return entry.product._replace(m=0, n=n, k=k)

    kinds = {kind(entry) for entry in table.entries}
    kept = [] if others is None else [e for e in others.entries if kind(e) not in kinds]
    return table._replace(entries=(*kept, *table.entries))


def _set(table: Table) -> list[str]:
    """Passes a table to the kernels. Returns reasons against entries."""
    entries = [(entry.product, entry.choice, entry.min_m) for entry in table.entries]
    return list(filter(None, selection.set_tuned(table.device, entries)))


def files() -> list[Path]:
    """The file in `JAXLOWBIT_TUNED`, none if that is empty, or else all in the user's cache."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return [Path(named)] if named else []
    try:
        return sorted(_cache().glob("*.json"))
    except (OSError, RuntimeError):  # there is no home directory
        return []


def path_for(device: str) -> Path:
    """The default path of the table of a device."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else _cache() / (re.sub(r"[^\w.-]+", "-", device) + ".json")


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None if unknown."""
    try:
        found = re.search(
            r"\b\d{3}\.\d+(\.\d+)?\b", (_DRIVER / "version").read_text(encoding="utf-8")
        )
    except OSError:
        return None
    return found[0] if found else None


def misfit(table: Table) -> str | None:
    """Returns None if a table matches the device, library and driver here, else the reason."""
    driver = driver_version()
    if not _is_here(table.device):
        return f"it was measured on {table.device.name}, and here is {', '.join(_models())}"
    if table.jaxlowbit != __version__:
        return f"it was measured with jaxlowbit {table.jaxlowbit}, and this is {__version__}"
    if None not in (driver, table.driver) and table.driver != driver:
        return f"it was measured with driver {table.driver}, and this is {driver}"
    return None


def _is_here(device: DeviceFacts) -> bool:
    """Whether the driver lists such a GPU, or no GPU."""
    models = _models()
    # The name of a GPU partition begins with the name of the GPU.
    return not models or any(device.name.startswith(model) for model in models)


def _models() -> list[str]:
    """Names of the GPUs here; empty if the driver does not list them."""
    try:
        texts = [path.read_text(encoding="utf-8") for path in _DRIVER.glob("gpus/*/information")]
    except OSError:
        return []
    return sorted({found[1] for text in texts if (found := re.search(r"Model:\s*(\S.*\S)", text))})


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlowbit"


def _warn_unused(path: Path, reason: str) -> None:
    _warn(f"the choices in {path} are not used: {reason}. Run jaxlowbit tune again.")


def _warn(sentence: str) -> None:
    warnings.warn(f"jaxlowbit: {sentence}", RuntimeWarning, stacklevel=3)


# --- the file -------------------------------------------------------------------------------------


def write(path: Path, table: Table) -> None:
    """Writes a table completely or, on failure, not at all."""
    found = {
        "jaxlowbit": table.jaxlowbit,
        "driver": table.driver,
        "device": table.device._asdict(),
        "entries": [_to_json(entry) for entry in table.entries],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> Table:
    """Reads a table.

    **Raises:** `OSError`, and `ValueError` for a file with other content.
    """
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        return Table(
            device=_record(DeviceFacts, found["device"]),
            driver=found["driver"],
            jaxlowbit=found["jaxlowbit"],
            entries=tuple(map(_from_json, found["entries"])),
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"it is damaged ({error})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is no table of choices ({type(error).__name__}: {error})") from None


def _to_json(entry: Entry) -> dict[str, Any]:
    product = entry.product._asdict() | {"format": format_name(entry.product.format)}
    choices = {"choice": entry.choice._asdict(), "default": entry.default._asdict()}
    return entry._asdict() | {"product": product} | choices


def _from_json(found: dict[str, Any]) -> Entry:
    product = found["product"]
    entry = Entry(
        _record(Product, product | {"format": parse_format(product["format"])}),
        _record(Choice, found["choice"]),
        float(found["us"]),
        _record(Choice, found["default"]),
        float(found["default_us"]),
        int(found.get("min_m", 1)),
    )
    if not min(entry.us, entry.default_us) > 0:
        raise ValueError(f"us is {entry.us} and default_us {entry.default_us}")
    if entry.product.format.scale is not None:
        raise ValueError(
            f"format {product['format']} has 8-bit scales, which tables do not support"
        )
    if entry.product.format.codebook is not None:
        raise ValueError(f"format {product['format']} has a codebook, which tables do not support")
    lhs, scale = entry.product.lhs, entry.product.scale
    if lhs not in LHS or scale not in (*LHS, "float32"):
        raise ValueError(f"lhs {lhs} and scale {scale} are no dtypes of the kernels")
    return entry


def _record(kind: type[Any], fields: dict[str, Any]) -> Any:
    """A named tuple of checked fields, whose integers fit 32 bits; sizes are positive, if known."""
    record = kind(**fields)
    for name, expected in kind.__annotations__.items():
        least = 0 if kind is Choice or name in kind._field_defaults else 1
        value = getattr(record, name)
        if type(value) is not expected:
            raise TypeError(f"{name} is {value!r}")
        if expected is int and not least <= value < 1 << 31:
            raise ValueError(f"{name} is {value}")
    return record
