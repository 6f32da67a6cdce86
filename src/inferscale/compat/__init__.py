"""Interfaces of other memory libraries to `Memory`. None of those libraries is imported."""
