import sys

from psm.cli.main import main

sys.exit(main())
