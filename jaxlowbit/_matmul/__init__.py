"""Quantized products: the public function, its primitive, lowering and partitioning.

Importing this package registers the rules of the primitive.
"""

from . import lowering as lowering
from . import rules as rules
from . import taylor as taylor
