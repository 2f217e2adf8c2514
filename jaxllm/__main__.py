"""`python -m jaxllm` is `jaxllm`."""

import sys

from jaxllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
