"""The static choices of one attention call."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What does not change between steps, and so is compiled in.

    Attributes:
      axis: the mesh axis of the shard group.
      scale: factor on the scores.
      softcap: bound of the scores by tanh, or None.
      window: tokens that a row sees, itself included; None for all before it.
      backend: name of the attention backend.
    """

    axis: str
    scale: float
    softcap: float | None
    window: int | None
    backend: str
