"""Facts out of a memory and into one: JSON lines, and the stores of Mem0.

for record in export_facts(memory, Scope(user_id="ana"), with_history=True): ...
import_facts(memory, read_source("facts.jsonl"))
"""

from inferscale.transfer.moves import export_facts, import_facts
from inferscale.transfer.sources import Item, read_source

__all__ = ["Item", "export_facts", "import_facts", "read_source"]
