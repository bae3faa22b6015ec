"""`python -m genrl`, which launchers such as `torchrun ... -m genrl` need."""

import sys

from genrl.cli import main

sys.exit(main())
