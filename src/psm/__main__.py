import sys

from psm.cli import main

sys.exit(main())
