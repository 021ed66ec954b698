"""What the inline assembly of the pieces does on the emulated machine."""

from gluon_streams import STREAMS as ASSEMBLY  # noqa: F401
from gluon_streams import copy  # noqa: F401
