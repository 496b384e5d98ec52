from flatout.api import linear_cross_entropy as linear_cross_entropy
from flatout.api import pack as pack
from flatout.api import plan as plan
from flatout.api import settings as settings
from flatout.api import train as train

__version__: str
__all__ = ["__version__", "linear_cross_entropy", "pack", "plan", "settings", "train"]
