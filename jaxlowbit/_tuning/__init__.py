"""The commands about kernels: `info`, `explain`, `tune` and `compile`; and tables of measured choices."""
