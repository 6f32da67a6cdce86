"""The tiers below the pool when an engine starts: which there are, and what an earlier engine left there."""

from __future__ import annotations

import logging

from inferscale.config import ConnectorConfig
from inferscale.connector.tiering import Tiering
from inferscale.errors import EngineError, InvalidConfig
from inferscale.pool.disk import DiskStore
from inferscale.pool.shared_store import SharedStore
from inferscale.pool.shared_tier import SharedTier
from inferscale.pool.table import PageTable
from inferscale.pool.tiers import Tier, TierName
from inferscale.runtime.folder_lock import FolderLock

logger = logging.getLogger(__name__)


def open_tiering(
    config: ConnectorConfig,
    table: PageTable,
    store: DiskStore,
    num_ranks: int,
    steps_at_once: int = 1,
    cold: SharedStore | None = None,
) -> Tiering | None:
    """The tiers that the settings name, with what an earlier engine left on disk; None without any.

    store, cold: of the first rank, whose files stand for those of all; what only others have on disk is
    removed. So are files beyond the tier's size, the oldest first. Where another engine uses the files, this
    one goes without. Raises InvalidConfig where the folder cannot be used.
    """
    tiers: list[Tier] = []
    if config.host_bytes:
        tiers.append(Tier("host", config.host_bytes, config.max_share))
    lock = _locked(config, store) if config.disk_bytes else None
    if lock is not None:
        tiers.append(Tier("disk", config.disk_bytes, config.max_share))
    if not tiers and cold is None:
        return None

    def size_of(name: TierName, num_tokens: int) -> int:
        return num_tokens * store.token_bytes if name == "host" else store.size_of(num_tokens)

    shared = None if cold is None else SharedTier(cold)
    tiering = Tiering(table, tiers, size_of, num_ranks, config.tier_wait, steps_at_once, shared)
    if lock is not None:
        tiering.lock = lock
        found = sorted(store.scan(), key=lambda file: file.used_s)
        known = {file.key for file in found}
        for other in map(store.of_rank, range(1, num_ranks)):
            for file in other.scan():  # of a process that was killed: nothing would ever remove it
                if file.key not in known:
                    other.remove(file.key)
        tiering.restore(found)
    return tiering


def _locked(config: ConnectorConfig, store: DiskStore) -> FolderLock | None:
    """The lock of the files, None where another engine has it: each knows only what it wrote itself."""
    try:
        store.open()
        return FolderLock(store.folder.parent)
    except EngineError:
        logger.warning(
            "Another engine uses the KV in %s; this one keeps none on disk. Give it a disk_dir of its own.",
            config.disk_dir,
        )
        return None
    except OSError as error:
        raise InvalidConfig(
            f"disk_dir {config.disk_dir} cannot be used: {error}. Name a folder that you can write to."
        ) from error
