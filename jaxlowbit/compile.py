"""Compiles CUDA kernels into the cache, without a GPU: `python -m jaxlowbit.compile`."""

from ._tuning.compiling import main as _main

if __name__ == "__main__":
    _main()
