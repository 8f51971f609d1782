"""Many collectors, in processes of this machine or of many, and one learner: see `Collectors`."""

from marlvec.collect.metrics.collector_stats import CollectorStats
from marlvec.distributed.accounting.ledger import Accounting
from marlvec.distributed.collectors import Collectors
from marlvec.distributed.place import Place

__all__ = ["Collectors", "Accounting", "CollectorStats", "Place"]
