"""Measures the choices of the CUDA kernels on this machine's GPU: `python -m jaxlowbit.tune`."""

from ._tuning.command import main as _main
from ._tuning.command import tune as tune

if __name__ == "__main__":
    _main()
