"""Raises readable errors for packages that are missing or too old, before they are used.

Importing this module checks JAX; modules that need Flax call the check for it.
"""

import importlib.util
import re
from importlib import metadata

OLDEST = {"flax": "0.12", "jax": "0.10"}  # as in pyproject.toml


def require(package: str) -> None:
    """Checks the version that the package's metadata tell, without importing it.

    A package without metadata, such as a source tree on the path, is taken as it is.

    **Raises:** `ImportError`.
    """
    oldest = OLDEST[package]
    rule = f'{oldest} or newer is needed; pip install --upgrade "{package}>={oldest}"'
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec(package) is None:
            message = f"jaxlowbit: {package} is not installed, but {rule}."
            raise ModuleNotFoundError(message, name=package) from None
        return
    if _release(found) < _release(oldest):
        raise ImportError(f"jaxlowbit: {package} is {found}, but {rule}.", name=package)


def require_extra(extra: str, *packages: str) -> None:
    """Checks that the packages of an extra are installed, without importing them.

    **Raises:** `ModuleNotFoundError`.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"jaxlowbit.{extra}: {package} is not installed; pip install "
                f'"jaxlowbit[{extra}]" brings it.',
                name=package,
            )


def _release(version: str) -> list[int]:
    """Major and minor number; pre-releases count as the release."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


require("jax")
