"""How the package writes for people: bytes with their unit, and the name that was meant."""

from fsdp_c._text._bytes import bytes_text, row
from fsdp_c._text._names import did_you_mean

__all__ = ["bytes_text", "did_you_mean", "row"]
