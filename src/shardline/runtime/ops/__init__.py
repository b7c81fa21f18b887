"""One op per file: a plain-torch oracle `<op>_reference` beside the entry that the engine calls.

Every op keeps the numerics law: an output element depends on its own row (or its own position and keys) and on the
weights, in one fixed order, never on the batch, the shard, the tiling or the number of threads.
"""
