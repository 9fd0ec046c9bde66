"""What models call instead of kernels.

``Ops`` asks the backend for an implementation of each ``OpSpec``, serves what it declines by the reference,
and reports what was chosen. What an op means is in ``drivetrain.ops.reference``.
"""

from drivetrain.ops.facade import Ops
from drivetrain.ops.report import OpChoice

__all__ = ["OpChoice", "Ops"]
