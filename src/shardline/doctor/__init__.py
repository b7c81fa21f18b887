"""`shardline doctor`: what is wrong with the nodes of a cluster, and between them, before anything is served."""
