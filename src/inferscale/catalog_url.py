"""The URL of a catalog in PostgreSQL: where it comes from, and that it is one. Never shown as a whole."""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qs, urlsplit

from inferscale.errors import InvalidConfig

VARIABLE = "INFERSCALE_CATALOG"
WAYS = f"--catalog, `catalog` in the settings, or ${VARIABLE}"
IN_FOLDER = "folder"
"""In a URL's place: the file of the data folder, whatever the environment says."""
_SCHEMES = ("postgresql", "postgres")
_SECRETS = {"password", "sslpassword"}


def find_url(given: str | None = None) -> str | None:
    """The URL that was given, or else that in the environment; None: the catalog is a file of the folder.

    given: or `IN_FOLDER`. Raises InvalidConfig for what is no such URL.
    """
    if given == IN_FOLDER:
        return None
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
    # libpq would take what stands before such a '/' for a host and its port, and show it.
    if "@" in url.partition("://")[2].partition("?")[0].partition("/")[2]:
        raise InvalidConfig(
            f"{name} has an '@' behind a '/'; in user, password and database write special characters as %XX "
            "('/' is %2F, '@' is %40)."
        )
    return url


def has_password(url: str) -> bool:
    """Also where the URL cannot be read; and as libpq reads it, where '?' and '#' may stand in a password."""
    if re.match(r"[^:/@]+://[^/@:]*:[^/@]*@", url):
        return True
    try:
        parts = urlsplit(url)
        return parts.password is not None or not _SECRETS.isdisjoint(parse_qs(url.partition("?")[2]))
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
