"""Typed errors. Every message names the value, the limit and the way out.

Wrong input is a ``ValueError``; a backend that cannot do a case raises ``NotImplementedError``. The
subclasses exist where a caller may want to act on the difference.
"""

from __future__ import annotations


class ShapeError(ValueError):
    """A rank, extent or multiple is wrong; the message holds the numbers."""


class FormatError(ValueError):
    """Weight formats, dtypes or scales do not fit together."""


class LossyConversionError(ValueError):
    """A load-time weight conversion would change values; names the expert, the block and the worst error."""


class LossyConversionWarning(UserWarning):
    """A load-time weight conversion changed values, as allowed; names the expert, the block and the worst error."""


class CheckpointError(ValueError):
    """A checkpoint tensor is missing, unexpected, wrongly shaped or wrongly typed; names the tensor."""


class BackendUnavailable(NotImplementedError):
    """A named backend cannot do this case; the message holds the reason."""


class KernelCompileError(RuntimeError):
    """The compiler refused a kernel source; the message holds its log, the kernel, the arch and the include paths."""


class CacheError(RuntimeError):
    """The cubin cache cannot be written; names the directory, the reason and the way out."""


class EpFailure(RuntimeError):
    """A kernel that exchanges tokens failed, for example because a rank did not arrive in time; names the context."""
