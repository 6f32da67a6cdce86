"""`add(…, infer=True)`: a conversation → facts → what they change. Safe from several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferscale.catalog import Added, Catalog
from inferscale.config import ExtractionConfig
from inferscale.extraction.change import Changer, Embed, ScopeLocks
from inferscale.extraction.extract import Extractor, Said
from inferscale.extraction.llm import ExtractionModel
from inferscale.extraction.prompts import Prompts
from inferscale.facts import Scope, Turn


class Inference:
    """A model with how it is asked, and the locks of the scopes that are being changed in this process."""

    def __init__(
        self,
        model: ExtractionModel,
        config: ExtractionConfig | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        self.model = model
        self.config = config if config is not None else ExtractionConfig()
        self.prompts = prompts if prompts is not None else Prompts()
        self._locks = ScopeLocks()

    def add(
        self,
        catalog: Catalog,
        embed: Embed,
        label: Callable[[Turn], str],
        scope: Scope,
        talk: Sequence[Said],
    ) -> Added:
        """Extract the facts of a conversation and carry out what they change in exactly this scope.

        The model is asked for facts without a lock, and what a fact changes under that of its scope. Raises
        what the catalog and `embed` raise; nothing that the model does is an error.
        """
        found = Extractor(self.model, self.config, self.prompts).extract(talk)
        changer = Changer(catalog, self.model, embed, label, self._locks, self.config, self.prompts)
        return changer.store(scope, found.facts, found.raw, found.warning)
