"""What the process has from which engines over the stand-in are forked: their imports, and the stand-in's versions."""

import os
import sys

import tests.stand_ins.engines  # noqa: F401 - with all that it imports
from tests.stand_ins.paths import PATHS
from tests.stand_ins.versions import STAND_INS

sys.path[:0] = map(str, PATHS)
for version in ("1.2.1", "1.3.0", "1.4.0"):
    os.environ["STAND_IN_VERSION"] = version  # noqa: TID251 - of this process alone
    STAND_INS.load(version)
STAND_INS.unload()
