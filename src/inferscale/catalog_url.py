"""The URL of a catalog in PostgreSQL: where it comes from, and that it is one. Never shown as a whole."""

from __future__ import annotations

import os
from urllib.parse import parse_qs, urlsplit

from inferscale.errors import InvalidConfig

VARIABLE = "INFERSCALE_CATALOG"
WAYS = f"--catalog, `catalog` in the settings, or ${VARIABLE}"
_SCHEMES = ("postgresql", "postgres")


def find_url(given: str | None = None) -> str | None:
    """The URL that was given, or else that in the environment; None: the catalog is a file of the folder.

    Raises InvalidConfig for what is no such URL.
    """
    if given is not None:
        return check_url(given, "catalog")
    url = os.environ.get(VARIABLE)
    return check_url(url, f"${VARIABLE}") if url else None


def check_url(url: object, name: str) -> str:
    """Raises InvalidConfig, which does not show the URL: it may hold a password."""
    if not isinstance(url, str) or url.partition("://")[0] not in _SCHEMES:
        raise InvalidConfig(
            f"{name} is no URL of a PostgreSQL database; allowed is postgresql://USER@HOST:PORT/DATABASE. "
            "Leave it out to keep the catalog in the data folder."
        )
    return url


def has_password(url: str) -> bool:
    """Also where the URL cannot be read."""
    try:
        parts = urlsplit(url)
        return parts.password is not None or "password" in parse_qs(parts.query)
    except ValueError:
        return True


def check_public_url(url: object, name: str) -> str:
    """The same for a setting that is logged. Raises InvalidConfig for a URL with a password too."""
    checked = check_url(url, name)
    if has_password(checked):
        raise InvalidConfig(
            f"{name} holds a password, and vLLM shows this setting in its log. Give the whole URL in "
            f"${VARIABLE} instead, or the password in $PGPASSWORD or a password file."
        )
    return checked
