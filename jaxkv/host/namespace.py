"""What separates equal tokens in the cache: tenants, adapters, images.

A value, compared field by field and never as joined strings, so that no field's text
can pass for another's.
"""

import dataclasses
import hashlib
import json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Namespace:
    """What keeps equal tokens apart in the cache; compared field by field.

    Attributes:
      salt: a tenant's secret, so that nobody learns from timing what others asked.
      adapter_id: the adapter (LoRA) whose weights computed the KV.
      multimodal_hash: digest of the images or sounds behind placeholder tokens.

    >>> Namespace(salt="a", adapter_id=1) == Namespace(salt="a", adapter_id="1")
    False
    """

    salt: str | None = None
    adapter_id: int | str | None = None
    multimodal_hash: bytes | str | None = None

    def __post_init__(self):
        allowed = {
            "salt": str,
            "adapter_id": int | str,
            "multimodal_hash": bytes | str,
        }
        for name, types in allowed.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, types):
                expected = getattr(types, "__name__", types)
                raise TypeError(f"{name}={value!r} must be {expected} or None")

    def digest(self) -> bytes:
        """The hash that the first page's hash starts from: sha256, 32 bytes."""
        fields = []
        for value in dataclasses.astuple(self):
            text = value.hex() if isinstance(value, bytes) else value
            fields.append([type(value).__name__, text])
        return hashlib.sha256(json.dumps(fields).encode()).digest()


DEFAULT_NAMESPACE = Namespace()
"""The namespace of plain requests."""
