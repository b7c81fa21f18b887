"""guidellm's command, with torch and transformers of another environment: TORCH_PACKAGES is its site-packages.

guidellm makes its data with both, which no other client needs. Shardline's own tests have them, so that the clients'
environment gets no copy. What guidellm starts in further processes begins here too.
"""

from __future__ import annotations

import os
import sys

# Behind everything else, so that the clients' own packages are preferred.
sys.path.append(os.environ["TORCH_PACKAGES"])

if __name__ == "__main__":
    from guidellm.__main__ import cli

    cli()
