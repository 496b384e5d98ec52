from flatout import hf as hf
from flatout.api import accelerate as accelerate
from flatout.api import linear_cross_entropy as linear_cross_entropy
from flatout.api import pack as pack
from flatout.api import plan as plan
from flatout.api import settings as settings
from flatout.api import train as train
from flatout.meter import Meter as Meter

__version__: str
__all__ = [
    "Meter",
    "__version__",
    "accelerate",
    "hf",
    "linear_cross_entropy",
    "pack",
    "plan",
    "settings",
    "train",
]
