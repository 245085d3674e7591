"""Commands about kernels (`info`, `explain`, `tune`, `compile`), and tables of measured choices."""
