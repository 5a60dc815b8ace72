"""What running processes show of themselves, seen from outside."""
