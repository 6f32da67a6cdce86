"""Errors of InferScale, one tree.

    InferScaleError
    ├── InvalidInput (ValueError)     what the caller gave cannot be used
    │   ├── EmptyText                 blank text, or text that holds a NUL byte only
    │   ├── TextTooLong               more tokens than the model can encode
    │   ├── UnknownScope              a scope without any fact
    │   ├── UnknownFact               an id that names no fact
    │   ├── QuotaExceeded             more facts or bytes than one user may store
    │   └── InvalidConfig             a setting that is unknown, of a wrong type or out of range
    ├── CatalogError                  the data folder, or its database, cannot be used
    │   ├── CatalogUnreachable        a database server does not answer; try again later
    │   ├── NewerCatalog              written by a newer version
    │   ├── WrongKey                  encrypted with another key, or read without one
    │   └── EmbedderMismatch          vectors of another embedder
    ├── ExtractionError               a model gave no answer that facts can be read from
    ├── PlanRejected                  a plan whose form, version or signature is wrong
    └── EngineError                   this model or engine cannot be served
        ├── EngineMissing             vLLM or a model is not installed
        ├── NotRelocatable            a rotary variant whose keys cannot be moved
        ├── UnsupportedLayout         a paged cache that the probe cannot read
        └── PoolTooLarge              the pool does not fit into free memory

Every message says what was given, what is allowed and what to do.
"""

from __future__ import annotations


class InferScaleError(Exception):
    """Base of every error that InferScale raises on purpose."""


class InvalidInput(InferScaleError, ValueError):
    """What the caller gave cannot be used; the message says what can."""


class EmptyText(InvalidInput):
    """The text to remember or to ask is blank."""


class TextTooLong(InvalidInput):
    """The text has more tokens than the model can encode."""


class UnknownScope(InvalidInput):
    """The scope holds no fact."""


class UnknownFact(InvalidInput):
    """No fact has this id."""


class QuotaExceeded(InvalidInput):
    """The user would hold more facts, or more bytes, than is allowed. Nothing of the call was stored."""


class InvalidConfig(InvalidInput):
    """A setting is unknown, of a wrong type or out of range."""


class CatalogError(InferScaleError):
    """The data folder, or the database of its catalog, cannot be used."""


class CatalogUnreachable(CatalogError):
    """The database server of the catalog does not answer. What is asked later may be answered again."""


class NewerCatalog(CatalogError):
    """The catalog was written by a newer version of InferScale."""


class WrongKey(CatalogError):
    """The catalog is encrypted with another key, or not encrypted, or read without a key."""


class EmbedderMismatch(CatalogError):
    """The catalog holds vectors of another embedder."""


class ExtractionError(InferScaleError):
    """A model gave no answer that facts can be read from. It is asked again; then turns are stored."""


class PlanRejected(InferScaleError):
    """A plan whose form, version or signature is wrong. Its prompt is prefilled as text.

    A plan for another model, or one older than its scope, is read; its outcome says why it was not used.
    """


class EngineError(InferScaleError):
    """This model or engine cannot be served."""


class EngineMissing(EngineError):
    """vLLM, or a model it should serve, is not installed."""


class NotRelocatable(EngineError):
    """Keys of this rotary variant cannot be moved to another position."""


class UnsupportedLayout(EngineError):
    """The start-up probe cannot read this paged cache."""


class PoolTooLarge(EngineError):
    """The pool does not fit into the memory that is free."""
