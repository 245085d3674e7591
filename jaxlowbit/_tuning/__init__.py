"""Choices of kernels: devices, `explain`, tables of measured choices, and how they are measured."""
