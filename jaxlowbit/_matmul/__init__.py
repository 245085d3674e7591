"""One product: the public function, its primitive, and how programs lower and divide it.

Importing this package registers the rules of the primitive.
"""

from . import lowering as lowering
from . import rules as rules
from . import taylor as taylor
