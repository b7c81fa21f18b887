"""Which tokens constrained sequences may have next: a sandbox follows their grammars, never a rank."""
