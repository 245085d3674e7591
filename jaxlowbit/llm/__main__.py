"""`python -m jaxlowbit.llm`: chat, generate, perplexity and bench."""

from pathlib import Path

import jax

from .._llm.command import main

if __name__ == "__main__":
    # The next start finds what this one compiled, unless JAX is told of another place.
    if jax.config.jax_compilation_cache_dir is None:
        folder = Path("~/.cache/jaxlowbit/compiled").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    main()
