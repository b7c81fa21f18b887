"""How linear weights are held: one file per scheme, named as `--quantization` names it; `base.py` is the contract."""
