"""Results as JSON: the environment, and one row per cell."""

import argparse
import datetime
import gzip
import json
import os
import platform
import subprocess
import sys
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import peers

_SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


class InputError(Exception):
    """An error in the arguments or files of a command. The message is a sentence."""


def positive(text: str) -> int:
    """Parses a positive number of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def require_folder(folder: Path | None) -> None:
    """**Raises:** `InputError` if the folder is given but does not exist."""
    if folder is not None and not folder.is_dir():
        raise InputError(f"the folder {folder} does not exist; make it first.")


def environment() -> dict[str, Any]:
    """The machine and the versions that times depend on; null if unknown."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "device": device.device_kind,
        "runtime": " ".join(device.client.platform_version.split()),
        "gpu": _gpu() if device.platform == "gpu" else None,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "jaxlowbit": metadata.version("jaxlowbit"),
        "commit": _output(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"
        ),
        "peers": {name: peers.version(peer) for name, peer in peers.PEERS.items()},
    }


def _gpu() -> dict[str, str] | None:
    query = f"--query-gpu={','.join(_SMI)}"
    found = _output("nvidia-smi", "--id=0", query, "--format=csv,noheader")
    return dict(zip(_SMI, found.split(", "), strict=True)) if found else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe(found: dict[str, Any]) -> str:
    """The description above a table."""
    gpu = found["gpu"] or {}
    driver = f", driver {gpu['driver_version']}" if "driver_version" in gpu else ""
    commit = f" ({found['commit']})" if found["commit"] else ""
    return (
        f"{found['device']}{driver}, jax {found['jax']}, jaxlowbit {found['jaxlowbit']}{commit}, "
        f"{found['date'][:10]}"
    )


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes atomically; compressed if the name ends in .gz."""
    partial = path.with_suffix(".partial")
    text = (json.dumps(results, indent=1) + "\n").encode()
    partial.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    """**Raises:** `InputError` for a file that is missing or has other contents."""
    try:
        content = path.read_bytes()
        found = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} cannot be read as results: {error}") from None
    rows = found.get("rows") if isinstance(found, dict) else None
    if not rows or "environment" not in found or not all("shape" in row for row in rows):
        raise InputError(f"{path} contains no results; benchmark.py --out writes some.")
    return found
