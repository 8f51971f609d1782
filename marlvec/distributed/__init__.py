"""Many collectors, in processes on one machine or several, and one learner: see `Collectors`."""

from marlvec.collect.metrics import CollectorStats
from marlvec.distributed.accounting import Accounting
from marlvec.distributed.collectors import Collectors
from marlvec.distributed.server import Place

__all__ = ["Collectors", "Accounting", "CollectorStats", "Place"]
