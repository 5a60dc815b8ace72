"""Bytes with their unit."""

_SCALES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def bytes_text(n_bytes: float) -> str:
    """With two decimals: "12.34 MiB"; below 1 KiB as they are: "436 B"."""
    for name, scale in _SCALES:
        if abs(n_bytes) >= scale:
            return f"{n_bytes / scale:,.2f} {name}"
    return f"{n_bytes:.0f} B"


def row(label: str, what: str, *amounts: float) -> str:
    """A line of a report: a label, bytes, and what they are."""
    columns = "".join(f"{bytes_text(n):>14}" for n in amounts)
    return f"  {label:18}{columns}  {what}".rstrip()
